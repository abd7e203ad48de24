"""KV that reaches the pool or leaves it without a forward."""
