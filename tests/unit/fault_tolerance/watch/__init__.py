"""Tests of fault_tolerance/watch."""
