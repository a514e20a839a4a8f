"""What learns in RL: policy, critic, reference, advantages and the learner over them. No generation here."""
