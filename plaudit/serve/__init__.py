"""Reward models behind HTTP: the server, its protocols and its workers. Only `workers` load torch."""
