"""What the pipelines that learn from rewards share: start-up, reward workers, advantages."""
