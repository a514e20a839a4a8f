"""Weight formats that are dequantised on loading: GGUF files and quantised checkpoints."""
