"""`plaudit launch`: what starts a recipe on a cluster. Imports no torch."""
