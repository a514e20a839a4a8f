"""Device memory of a run: usage by owner and phase, offloading, and whether a recipe fits."""
