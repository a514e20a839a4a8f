"""KServe v2 as Triton speaks it, for PyTriton and NeMo-Aligner clients."""
