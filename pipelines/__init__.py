"""Pipelines: one file for each algorithm family."""
