"""Changes of blocks between forwards."""
