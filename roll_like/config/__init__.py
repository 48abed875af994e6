"""Pydantic models of the YAML files, loading, planning."""
