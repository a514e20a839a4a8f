"""Rollouts: generate, play out environments, score, keep; and data for judges from what was kept."""
