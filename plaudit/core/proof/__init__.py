"""What the core accepts is proved: a model's stand-in is run by transformers and by the core, and both must agree."""
