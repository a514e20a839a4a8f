"""`plaudit critic`: a value model that trains, behind NeMo-Aligner's protocol. Its worker trains; the rest is HTTP."""
