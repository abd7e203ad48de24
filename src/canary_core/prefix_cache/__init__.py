"""Sweeps: what a prefix cache says that its slots hold, against what Canary remembers of them."""
