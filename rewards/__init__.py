"""Rewards that ship with roll_like, each a plugin like any user's."""
