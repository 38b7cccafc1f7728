"""Simulation of long runs under failures, pure: costs and seeds in, shares of the time out."""
