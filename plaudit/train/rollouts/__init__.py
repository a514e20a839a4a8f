"""Rollouts: generation, environments, scoring, dumps; and training data for reward models from dumps."""
