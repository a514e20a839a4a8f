"""LLM judges: the prompt sent to a language model, and how its answer becomes a score."""
