"""`generate()` and direct calls of a model, with their caches."""
