"""Unit tests of examples."""
