"""External engines (vLLM, SGLang) as a run's rollout engines."""
