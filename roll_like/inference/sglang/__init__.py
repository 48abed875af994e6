"""The engine on SGLang."""
