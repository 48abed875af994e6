"""Weights from the trainer to the engines: in memory, versioned and checked."""
