"""Command-line tools: data preparation."""
