"""Tests of conversions from and to Hugging Face."""
