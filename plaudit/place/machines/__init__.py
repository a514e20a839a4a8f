"""Machines of a run that generate for the ranks on others: what they and the trainer say to each other. No torch."""
