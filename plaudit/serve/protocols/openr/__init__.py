"""OpenR's protocol for process rewards."""
