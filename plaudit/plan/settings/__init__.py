"""A plan as settings of other projects. Each project states the source of its option names."""
