"""What searches did, as tables and as a page."""
