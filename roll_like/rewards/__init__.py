"""What rewards are made of, and the workers that run them."""
