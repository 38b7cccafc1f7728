"""Strategy `partial`: k experts per layer in each snapshot (MoC-System)."""
