"""Reports about runs. Reads events.jsonl and nothing else; can be deleted without affecting other packages."""
