"""The training engine, its ranks and its backends."""
