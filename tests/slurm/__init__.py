"""Jobs under a real SLURM of three nodes on this machine."""
