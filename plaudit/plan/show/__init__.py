"""A plan for a person or a program: terminal, HTML page, JSON, explanation. Nothing is computed here."""
