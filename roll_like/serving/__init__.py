"""Using what a run has trained: a conversation in the terminal, vLLM's server, the hub."""
