"""From every role's figures to trackers, console and summary."""
