"""vLLM's pooling, scoring, classification and embedding routes."""
