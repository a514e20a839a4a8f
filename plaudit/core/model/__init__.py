"""A transformers decoder as the core runs it: packed forward, attention, heads, ranks and stages of one module. No
requests here."""
