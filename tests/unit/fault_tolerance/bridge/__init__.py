"""Tests of fault_tolerance/bridge that need no Bridge."""
