"""`plaudit bench`: what this machine does, each figure beside the limit that was measured in the same run."""
