"""The engine on vLLM, and its server for judges."""
