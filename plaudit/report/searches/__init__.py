"""Reports about searches, as tables and as a page."""
