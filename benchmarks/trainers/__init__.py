"""What benchmarks/training.py compares: batches, this package's engines, bare PyTorch loops, TRL's trainers."""
