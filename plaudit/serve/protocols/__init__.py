"""One folder per protocol: `wire` turns bodies into records and records into replies, `routes` says which paths it
answers."""
