"""Chat templates: messages to token ids, rendered in another process with a deadline."""
