"""Block accounting: the pool, the prefix cache, KV groups. No tensors, no torch."""
