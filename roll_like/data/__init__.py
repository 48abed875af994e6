"""Datasets to tasks."""
