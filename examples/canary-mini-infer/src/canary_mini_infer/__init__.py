"""Canary for mini-infer: guards its paged KV pool."""
