"""The engine on Hugging Face transformers: the reference, and for small cases."""
