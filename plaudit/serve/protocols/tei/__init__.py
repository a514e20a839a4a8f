"""Text Embeddings Inference's and Infinity's routes."""
