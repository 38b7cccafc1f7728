"""Links to peers: sending replicas, keeping those of other ranks, and reading state back."""
