"""Host memory on tmpfs: regions and pools, their layouts, the directories of jobs."""
