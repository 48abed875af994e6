"""Preference optimisation on given pairs or labelled answers."""
