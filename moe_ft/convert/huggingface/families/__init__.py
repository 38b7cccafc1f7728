"""Families of models on the Hugging Face hub; registry.py lists them."""
