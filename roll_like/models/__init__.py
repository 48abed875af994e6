"""Loading and exporting models."""
