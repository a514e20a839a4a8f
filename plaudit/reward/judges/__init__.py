"""Judges: what a language model is asked about a response and how its reply becomes a score."""
