"""NeMo-Aligner's critic protocol."""
