"""Distillation on the student's own answers."""
