"""Canary for vLLM. `plugin` is turned on by ``CANARY_PLUGINS=vllm``.

The rooms: ``compat`` (differences between releases and runners), ``pools`` (places of bytes), ``batches`` (reads and
writes of a forward), ``allocator`` (changes of blocks between forwards, also with the scheduler in another process),
``prefix_cache``, ``arrivals`` (KV brought by a connector), ``actions``.
"""
