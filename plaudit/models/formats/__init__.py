"""Forms of weights that are read as plain ones: GGUF files and quantised checkpoints."""
