"""Back ends: where KV is stored, how a device attends, where the decode loop runs. No scheduling here."""
