"""A run on a Ray cluster: ranks, rollout workers and rewards as actors. The one place of `place` that imports ray."""
