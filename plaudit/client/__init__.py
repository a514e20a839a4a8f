"""`RewardClient` and `AsyncRewardClient`: requests, retries, deadlines, replicas. Loads no torch."""
