"""Runs on a Ray cluster: ranks, rollout workers and rewards as actors. Only this package of `place` imports ray."""
