"""Strategy `selective`: experts by their tokens, within budgets of bytes for each target (MoEtion)."""
