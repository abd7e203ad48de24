"""KV that reaches the pool, or leaves it, by another way than a forward."""
