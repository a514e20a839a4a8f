"""Data for training: rows of files and worlds, prompts of RL and their token ids."""
