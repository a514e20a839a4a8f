"""OpenAI's generation API: chat completions and completions of a causal LM."""
