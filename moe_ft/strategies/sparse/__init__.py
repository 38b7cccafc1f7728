"""Strategy `sparse`: windows of snapshots that hold every unit once (MoEvement)."""
