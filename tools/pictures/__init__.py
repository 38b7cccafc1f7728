"""Pictures of the documentation, drawn by scripts: `python -m tools.pictures`."""
