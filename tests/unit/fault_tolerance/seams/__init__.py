"""Tests of fault_tolerance/seams."""
