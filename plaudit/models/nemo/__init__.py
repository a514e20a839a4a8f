"""NeMo's archives of reward models (`.nemo`), turned into plain Hugging Face directories."""
