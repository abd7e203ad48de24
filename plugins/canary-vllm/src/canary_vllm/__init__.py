"""Canary for vLLM. `plugin` is what ``CANARY_PLUGINS=vllm`` turns on.

The rooms: ``compat`` (what differs between releases and runners), ``pools`` (where the bytes are), ``batches`` (what a
forward reads and writes), ``allocator`` (what happens to blocks between forwards, also where the scheduler is another
process), ``prefix_cache``, ``arrivals`` (KV that a connector brings), ``actions``.
"""
