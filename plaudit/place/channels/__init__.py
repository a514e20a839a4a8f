"""Weight channels from a trainer to its engines: disk, collective, shared memory. No generation code."""
