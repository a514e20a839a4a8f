"""Sampling parameters, and tokens drawn from logits."""
