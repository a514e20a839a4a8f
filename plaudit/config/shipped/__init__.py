"""Recipes that come with the package: by name, and templates of recipes for one's own data."""
