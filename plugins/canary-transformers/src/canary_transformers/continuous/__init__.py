"""Continuous batching: `generate_batch` and its paged cache."""
