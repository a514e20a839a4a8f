"""Placements, weight channels, external engines (vLLM, SGLang) and the memory ledger."""
