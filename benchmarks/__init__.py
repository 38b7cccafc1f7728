"""Every performance claim as a script: peers in the same run, medians with their range."""
