"""Tests of several ranks over gloo."""
