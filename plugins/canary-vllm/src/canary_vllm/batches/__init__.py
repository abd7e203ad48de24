"""Reads and writes of one forward."""
