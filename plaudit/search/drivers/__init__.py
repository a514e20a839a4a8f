"""How one question is searched round by round: levels of a tree, MCTS, particle filtering."""
