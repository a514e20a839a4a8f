"""The report's page over HTTP while its run is at work."""
