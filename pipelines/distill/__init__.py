"""Distillation on given data."""
