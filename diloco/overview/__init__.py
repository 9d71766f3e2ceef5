"""What a run has done so far, in a few lines: its first line, and what happened since a time."""
