"""Drivers, which search one question round by round: levels of a tree, MCTS, particle filtering."""
