"""Another name of `linnaeus analyze`, with speeds of training at the configured fraction: `linnaeus plan`."""
