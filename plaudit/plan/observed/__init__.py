"""Measured runs: read from their logs, compared with their plans, and fitted into constants."""
