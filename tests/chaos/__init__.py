"""Real jobs with faults from outside, drawn by seeds: `make chaos`."""
