"""Storage: the writer process and its client, checkpoints and their retention, the lock."""
