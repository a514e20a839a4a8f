"""Training: the loop, what is learned (SFT, rewards, step rewards), and the state of a run."""
