"""Repair in place: a rank that has died is replaced while the others wait in their iteration."""
