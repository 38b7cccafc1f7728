"""Tests of the law of membership: transcripts, and whatever happens."""
