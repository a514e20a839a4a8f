"""Rules: rewards computed by Python functions, in separate processes with a time limit."""
