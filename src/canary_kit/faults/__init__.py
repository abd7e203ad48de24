"""Fault injection: breaks the engine's own memory, tables and inputs on purpose, to prove that the alarm works.

Off unless ``CANARY_FAULTS`` is set. Every corruption happens at the place of a real one: in the tensors read by
attention, through the addresses of their `KVSource`. Slots are picked from Canary's records, with host reads, so that a
fault never races the forward's own writes nor hits the null slot; the reads cost time and are for self-tests only.
Nothing is injected during a graph capture.

Syntax: faults separated by ``;``, each a name, then ``:`` and ``key=value`` pairs separated by commas, e.g.
``real_kv_used:probability=0.01,warmup=50,source=v.3;lost_write``. Names are those of `FAULTS`, keys those of
`FaultSpec`.
"""
