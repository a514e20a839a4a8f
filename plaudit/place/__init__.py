"""Where things run: placements, weight channels, engines of other projects, the memory ledger."""
