"""Episodes: environment manager and workers, conversations, agent programs and their proxy."""
