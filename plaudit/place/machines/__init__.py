"""Rollout machines of a run that trains on other machines, and their messages with the trainer. No torch."""
