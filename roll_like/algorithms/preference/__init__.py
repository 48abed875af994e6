"""Preference losses: how pairs, or samples that are desirable or not, move the log-probabilities of responses."""

from roll_like.algorithms.preference import paired, reference_free, unpaired

__all__ = ["paired", "reference_free", "unpaired"]
