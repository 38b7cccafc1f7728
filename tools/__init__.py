"""Command-line tools: data preparation, checkpoint conversion."""
