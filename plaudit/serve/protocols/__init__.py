"""One file or folder per protocol: `wire` parses bodies to records and writes records as replies, `routes` defines the
paths it answers; small protocols have both in one file."""
