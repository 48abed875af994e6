"""Small working starting points: a reward, an environment, or a whole run with its data (`roll-like init`)."""
