"""The RL loop: `plaudit train` with `task = "rl"`. It drives a placement and knows none of them by name."""
