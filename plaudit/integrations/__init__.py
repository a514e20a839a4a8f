"""Reward functions for other trainers, which get rewards from `plaudit serve`, for trainers that take a function."""
