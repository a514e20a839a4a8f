"""Child processes: starting, exchanging frames, heartbeats, and stopping. Independent of models."""
