"""Memory that outlives a process, as extents, and the one rule of what may be overwritten."""
