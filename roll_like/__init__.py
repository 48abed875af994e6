"""Reinforcement learning on language models with Ray, vLLM and DeepSpeed."""
