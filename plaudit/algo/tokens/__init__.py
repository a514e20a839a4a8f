"""Token-level functions shared by all losses: log-probs of sampled tokens, and concatenated samples of any length."""
