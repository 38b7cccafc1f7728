"""Unit tests of fault_tolerance."""
