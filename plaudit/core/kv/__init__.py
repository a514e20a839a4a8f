"""The KV cache: blocks with reference counts, the prefix tree over them, handing KV to another engine. No tensors but
the pool's."""
