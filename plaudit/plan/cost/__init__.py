"""Formulas: bytes, seconds and money of each phase of a plan. Every number is a `Term` that explains itself."""
