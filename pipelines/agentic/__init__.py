"""Reinforcement learning over many turns, in environments."""
