"""Many seeded failure schedules of whole jobs, each in one process and one thread under virtual time."""
