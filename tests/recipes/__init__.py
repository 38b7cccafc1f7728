"""Public recipes of MoE training as files of flags, and what a start says of each."""
