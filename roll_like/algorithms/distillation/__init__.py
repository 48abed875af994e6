"""Distillation losses: divergences between next-token distributions of a student and a teacher."""

from roll_like.algorithms.distillation import divergences

__all__ = ["divergences"]
