"""The rules of the diagnosis. Each gives a finding, also a good one, or None where it has nothing to go by."""
