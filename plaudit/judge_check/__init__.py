"""How far a judge or a reward model can be trusted: agreement with labels, biases, self-consistency."""
