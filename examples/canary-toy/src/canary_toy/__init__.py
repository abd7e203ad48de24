"""Canary for toy: guards its paged KV pool."""
