"""Device memory of a run: who holds it phase by phase, what is offloaded when, whether a recipe fits."""
