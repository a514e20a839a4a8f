"""Output of a plan: terminal, HTML page, JSON, explanation. Nothing is computed here."""
