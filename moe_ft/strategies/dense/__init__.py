"""Strategy `dense`: every unit in full in every snapshot."""
