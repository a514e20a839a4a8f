"""Heads that transformers lacks: per-token value heads, two-layer reward heads, OpenRLHF's."""
