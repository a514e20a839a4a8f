"""Optimizers and how parameters are sharded over ranks."""
