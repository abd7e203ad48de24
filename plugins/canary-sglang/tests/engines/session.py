"""`SGLangSession`: a small SGLang for the conformance suite, driven and broken through nothing but SGLang itself."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from canary_core.testing import EngineSession
from engines.driver import Engine, take_down

TURNS = 4
"""A scheduler that has requests runs some of them in one of so many turns; in others it clears up behind those that
ended."""


class SGLangSession(EngineSession):
    """A scheduler and its model runner in this process, with new pools. ``options``: as of `Engine`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        try:
            self._engine = Engine(Path(self._folder.name), dict(options))
        except BaseException:
            # Else the next one would fail for another reason.
            take_down()
            raise
        self._requests: dict[str, Any] = {}
        self._rows: dict[str, Tensor] = {}
        # Everything that happens to an engine happens in its loop.
        self._loop = self._engine.loop()
        self._loop.__enter__()

    @property
    def _scheduler(self) -> Any:
        return self._engine.scheduler

    @property
    def _pool(self) -> Any:
        return self._engine.runner.token_to_kv_pool

    def pool_tensors(self) -> Mapping[str, Tensor]:
        """Buffers of the pool, those of its parts with the part's name."""
        return {
            f"{part}{buffer}.{i}": tensor
            for part, pool in self._parts()
            for buffer in ("k_buffer", "v_buffer", "kv_buffer")
            for i, tensor in enumerate(getattr(pool, buffer, None) or ())
        }

    def submit(self, request: str, tokens: Sequence[int], new_tokens: int) -> None:
        """Queues a request, as the tokenizer's process does."""
        self._requests[request] = self._engine.submit(list(tokens), new_tokens, request)

    def step(self) -> bool:
        """Turns of the scheduler's loop until one of them runs a batch."""
        ran = any(self._engine.step() for _ in range(TURNS))
        for name, request in self._requests.items():
            row = self._row(request)
            if row is not None:
                self._rows[name] = row[: len(request.origin_input_ids) + len(request.output_ids) - 1].clone()
        return ran

    def answer(self, request: str) -> Sequence[int]:
        """What the request has generated."""
        return [int(token) for token in self._requests[request].output_ids]

    def poke(self, layer: int, half: str, request: str, position: int) -> None:
        """Flips a bit where SGLang's table of tokens, and that of window slots, say that this KV is."""
        pool, index, slot = self._pool, layer, int(self._row(self._requests[request])[position])
        if hasattr(pool, "layers_mapping"):
            index, window = pool.layers_mapping[layer]
            if window:
                slot = int(pool.full_to_swa_index_mapping[slot])
            pool = pool.swa_kv_pool if window else pool.full_kv_pool
        getattr(pool, f"{half}_buffer")[index][slot].view(torch.uint8).view(-1)[3] ^= 1 << 2

    def close(self) -> None:
        """Ends the engine."""
        self._loop.__exit__(None, None, None)
        take_down()
        self._folder.cleanup()

    def misplace_write(self, request: str) -> None:
        """The bug of a wrong slot mapping: the next decode writes the request's token to a free slot."""
        scheduler = self._scheduler

        def wrong(batch: Any) -> Any:
            names = [r.rid for r in batch.reqs]
            if batch.forward_mode.is_decode() and request in names:
                del scheduler.run_batch
                batch.out_cache_loc = batch.out_cache_loc.clone()
                batch.out_cache_loc[names.index(request)] = int(self._allocator().free_pages[-1]) * self._page
            return type(scheduler).run_batch(scheduler, batch)

        scheduler.run_batch = wrong

    def release_running(self, request: str) -> None:
        """The bug of a free too many: the pages of the generated tokens go back to the allocator."""
        row = self._rows[request]
        first = -(-len(self._requests[request].origin_input_ids) // self._page) * self._page
        self._free(row[first:] if len(row) > first else row[-1:])

    def release_again(self, request: str) -> None:
        """The bug of a double release: the cached slots of a finished request are freed."""
        self._free(self._rows[request][: self._whole_pages(request)])

    def hand_out_cached(self) -> None:
        """The bug of a list that was overwritten: a cached page is at its front, and handed out."""
        allocator = self._allocator()
        allocator.free_pages[0] = self._scheduler.tree_cache.all_values_flatten()[0] // self._page
        allocator.alloc(self._page)

    def evict(self) -> None:
        """Empties the prefix cache of what no request holds."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        everything = self._engine.runner.max_total_num_tokens
        self._scheduler.tree_cache.evict(EvictParams(num_tokens=everything, swa_num_tokens=everything))

    def preempt(self, request: str) -> None:
        """The next decode finds the pool full once, and ``request`` is whom SGLang retracts."""
        batch = self._scheduler.running_batch
        enough, first = type(batch).check_decode_mem, True

        def full_at_first(*args: Any, **kwargs: Any) -> bool:
            nonlocal first
            full, first = first, False
            return False if full else bool(enough(batch, *args, **kwargs))

        def order(requests: Sequence[Any], *args: Any) -> list[int]:
            del batch._get_decode_retraction_order, batch.check_decode_mem
            return sorted(range(len(requests)), key=lambda i: requests[i].rid == request)

        batch.check_decode_mem, batch._get_decode_retraction_order = full_at_first, order
        before = self._retractions(request)
        self.step()
        if self._retractions(request) == before:
            raise RuntimeError(f"SGLang has not retracted {request}")

    def _retractions(self, request: str) -> int:
        return int(self._requests[request].retraction_count)

    @property
    def _page(self) -> int:
        return int(self._scheduler.page_size)

    def _parts(self) -> list[tuple[str, Any]]:
        parts = [(f"{name}.", getattr(self._pool, name, None)) for name in ("full_kv_pool", "swa_kv_pool")]
        return [(name, part) for name, part in parts if part is not None] or [("", self._pool)]

    def _allocator(self) -> Any:
        """That of the full pool."""
        allocator = self._scheduler.token_to_kv_pool_allocator
        return getattr(allocator, "full_attn_allocator", allocator)

    def _free(self, slots: Tensor) -> None:
        self._scheduler.token_to_kv_pool_allocator.free(slots.to(torch.int64))

    def _row(self, request: Any) -> Tensor | None:
        """The request's row of the table; None while it has none."""
        kv = request if hasattr(request, "req_pool_idx") else getattr(request, "kv", None)
        index = getattr(kv, "req_pool_idx", None)
        return None if index is None else self._scheduler.req_to_token_pool.req_to_token[index]

    def _whole_pages(self, request: str) -> int:
        return len(self._rows[request]) // self._page * self._page
