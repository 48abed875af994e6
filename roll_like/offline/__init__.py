"""What the pipelines that learn from given data share: batches, evaluators, checks."""
