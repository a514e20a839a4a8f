"""Formulas for the bytes, seconds and cost of each phase of a plan. Each is a `Term` with its formula."""
