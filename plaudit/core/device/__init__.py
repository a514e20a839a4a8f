"""Back ends: the KV storage, the attention and the decode loop of a device. No scheduling here."""
