"""Reading a job's state from outside: inspect, verify, clean."""
