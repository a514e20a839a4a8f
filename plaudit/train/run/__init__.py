"""Run state: directory, lock, checkpoints, random state, ranks, signals, progress."""
