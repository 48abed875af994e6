"""A run from its folder to its end: launch, steps, checkpoints, signals, export."""
