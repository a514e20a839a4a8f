"""`RewardClient` and `AsyncRewardClient`: requests, retries, deadlines, replicas. Imports no torch."""
