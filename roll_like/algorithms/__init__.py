"""Pure functions: advantages, policy losses, KL, corrections."""
