"""One file or folder per protocol: `wire` turns bodies into records and records into replies, `routes` says which paths
it answers; small protocols have both in one file."""
