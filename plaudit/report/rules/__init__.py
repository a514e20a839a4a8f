"""The rules of the diagnosis. Each returns a finding, also a good one, or None if it has no data."""
