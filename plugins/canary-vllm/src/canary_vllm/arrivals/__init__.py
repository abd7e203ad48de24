"""KV that connectors store and bring back, against the ledger."""
