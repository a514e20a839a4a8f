"""Rollout workers: the process that generates, the trainer's end of it, several of them as one engine."""
