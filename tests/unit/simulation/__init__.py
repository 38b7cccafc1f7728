"""Unit tests of the simulation itself."""
