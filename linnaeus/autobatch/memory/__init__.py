"""Memory of the device and of the host: how much there is and is used, a cap, out-of-memory errors."""
