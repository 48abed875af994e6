"""The DeepSpeed training engine."""
