"""AutoBatch in the training frameworks of others; each module needs the framework that it is named after."""
