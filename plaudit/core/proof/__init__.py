"""Proof that the core computes a model correctly: a small stand-in is run by transformers and by the core, and both
must agree."""
