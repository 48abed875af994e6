"""Harnesses that a run brings into the environments of verifiers; each is found by the name of its file."""
