"""Rollout workers: the process that generates, the trainer's end of it, and several workers as one engine."""
