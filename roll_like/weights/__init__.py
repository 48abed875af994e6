"""Trainer to inference weight synchronisation."""
