"""Tests of fault_tolerance/program."""
