"""Inventory, plan, restore, resume."""
