"""Preference optimisation on pairs of the policy's own answers."""
