"""Fault injection: breaks the engine's own memory, tables and inputs on purpose, to prove that the alarm works.

Off unless ``CANARY_FAULTS`` is set. Every corruption is done where a broken engine would do it: in the tensors that
attention reads, through the addresses of their `KVSource`. Slots are picked from Canary's records, with host reads, so
that a fault never races the forward's own writes nor hits the null slot; that costs time and is for self-tests only.
Nothing is injected while a graph is captured.

Syntax: faults separated by ``;``, each a name, then ``:`` and ``key=value`` pairs separated by commas, e.g.
``real_kv_used:probability=0.01,warmup=50,source=v.3;lost_write``. Names are those of `FAULTS`, keys those of
`FaultSpec`.
"""
