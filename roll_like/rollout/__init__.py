"""From tasks to scored groups."""
