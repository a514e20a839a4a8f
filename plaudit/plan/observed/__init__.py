"""What runs measured: read from their logs, set against their plans, and fitted into constants."""
