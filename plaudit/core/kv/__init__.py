"""The KV cache: reference-counted blocks, the prefix tree over them, KV transfer to another engine. No tensors but the
pool's."""
