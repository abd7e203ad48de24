"""Runs in and around a forward: what is checked, recorded and scrubbed when, and what is read back of it."""
