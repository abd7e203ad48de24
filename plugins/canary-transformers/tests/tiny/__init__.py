"""Tiny random models, and what they are asked to do under guard."""
