"""Work in and around a forward: when to check, record and scrub, and when to read back."""
