"""Listeners at the seams: progress, faults, digests, checkpoints, reports."""
