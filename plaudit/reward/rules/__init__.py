"""Rules: scores by Python functions, in processes of their own with a time limit."""
