"""Sweeps of SGLang's prefix caches."""
