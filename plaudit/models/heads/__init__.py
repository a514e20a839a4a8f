"""Heads that transformers does not have: a value for every token, rewards of two layers, OpenRLHF's."""
