"""The state of a run: directory, lock, checkpoints, random state, ranks, signals, progress."""
