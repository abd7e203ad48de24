"""KV on its way to or from the pool without a forward."""
