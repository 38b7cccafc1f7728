"""Unit tests of the simulation that tests/simulation runs jobs in."""
