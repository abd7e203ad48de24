"""Canary for the toy engine: guards its paged KV pool."""
