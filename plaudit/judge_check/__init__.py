"""Evaluates judges and reward models: agreement with labels, biases, self-consistency."""
