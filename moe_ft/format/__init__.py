"""Schemas of the files that moe_ft writes, and how state is packed in them."""
