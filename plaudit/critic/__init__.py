"""`plaudit critic`: a value model that is trained over HTTP with NeMo-Aligner's protocol. Its worker trains."""
