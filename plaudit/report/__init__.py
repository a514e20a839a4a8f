"""What a run did. Reads events.jsonl and nothing else; deletable without touching the rest."""
