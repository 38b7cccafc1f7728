"""Tests of fault_tolerance/cpu."""
