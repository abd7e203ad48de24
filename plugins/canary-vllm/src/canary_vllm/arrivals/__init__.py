"""KV that reaches blocks without a forward: what a connector loads."""
