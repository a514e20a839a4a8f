"""Converts NeMo reward model archives (`.nemo`) to plain Hugging Face directories."""
