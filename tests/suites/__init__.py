"""Engines' own tests under guard: `python3 tests/suites`."""
