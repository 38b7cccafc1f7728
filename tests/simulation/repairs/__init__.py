"""Simulation of repairs in place: keeper, rounds and membership of ranks that die, stop and hang."""
