"""RL learning: policy, critic, reference, teachers, advantages and the learner. Generation is elsewhere."""
