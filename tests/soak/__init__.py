"""Random traffic over real engines under guard: nothing may be found, and answers must be those without Canary.

``python3 tests/soak --help``. In the order in which data flows: `setups` (which engines there are), `plan` (what a
round asks of one), `served` and ``on_*`` (how an engine is driven), `child` (one engine in a process of its own),
`results` (what it came to), ``__main__`` (all processes, and the table).
"""
