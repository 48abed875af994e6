"""Ray: placement groups and typed groups of workers."""
