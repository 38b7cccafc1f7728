"""Figures of the papers that moe_ft follows: calculated, simulated, or measured at a small scale."""
