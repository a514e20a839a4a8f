"""SFT, reward-model and process-model training: examples, objectives, the loop."""
