"""Tests that need no process group; the folders mirror the tree."""
