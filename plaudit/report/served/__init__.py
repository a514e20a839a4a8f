"""Serves the report's page over HTTP during the run."""
