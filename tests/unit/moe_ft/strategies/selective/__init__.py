"""Tests of the strategy `selective`."""
