"""KV stored and brought back by connectors, against the ledger."""
