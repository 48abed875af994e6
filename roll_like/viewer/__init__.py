"""What the policy of a run wrote: rollouts as lists and texts in the terminal, or as a page for the browser."""
