"""`plaudit launch`: writes jobs that start a recipe on a cluster. Imports no torch."""
