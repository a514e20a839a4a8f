"""Token-level tools that every loss shares: log-probs of sampled tokens, and arrays of samples of any length end to
end."""
