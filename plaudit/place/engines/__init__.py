"""Engines of other projects (vLLM, SGLang, any OpenAI-compatible server) as a run's rollout engines."""
