"""Arithmetic only: tensors in, tensors out. No models, no files, no network."""
