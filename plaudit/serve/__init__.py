"""Reward models behind HTTP: the server, its workers and its clients. Only `worker` loads torch."""
