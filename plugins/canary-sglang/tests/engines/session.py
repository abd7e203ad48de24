"""`SGLangSession`: a small SGLang for the conformance suite, driven and broken through nothing but SGLang itself."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tools.weights import update
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
        self._key: Any = None
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
        if self._key is not None:
            _radix_key().__init__ = self._key
        self._loop.__exit__(None, None, None)
        take_down()
        self._folder.cleanup()

    def misplace_write(self, request: str) -> None:
        """The bug of a wrong slot mapping: the next forward writes the request's last token to a free slot."""
        scheduler = self._scheduler

        def wrong(batch: Any) -> Any:
            names = [r.rid for r in batch.reqs]
            if request in names:
                del scheduler.run_batch
                row = names.index(request) + 1
                last = (row if batch.forward_mode.is_decode() else sum(batch.extend_lens[:row])) - 1
                batch.out_cache_loc = batch.out_cache_loc.clone()
                batch.out_cache_loc[last] = int(self._allocator().free_pages[-1]) * self._page
            return type(scheduler).run_batch(scheduler, batch)

        scheduler.run_batch = wrong

    def misfeed(self, request: str) -> None:
        """The bug of a token that is another's, in what the forward reads."""

        def wrong(batch: Any, row: int, new: slice) -> None:
            batch.input_ids = batch.input_ids.clone()
            batch.input_ids[new.stop - 1] ^= 1

        self._before_forward(request, wrong)

    def shift_positions(self, request: str) -> None:
        """The bug of positions that count from one."""

        def wrong(batch: Any, row: int, new: slice) -> None:
            batch.positions = batch.positions.clone()
            batch.positions[new] += 1

        self._before_forward(request, wrong)

    def miscount(self, request: str, tokens: int) -> None:
        """The bug of a length that the device has wrong."""

        def wrong(batch: Any, row: int, new: slice) -> None:
            batch.seq_lens = batch.seq_lens.clone()
            batch.seq_lens[row] += tokens

        self._before_forward(request, wrong)

    def misplace_read(self, request: str, position: int, other: str) -> None:
        """The bug of an entry of the table that is another's, in one forward."""
        first = position // self._page * self._page
        page = slice(first, first + self._page)
        right = self._row(self._requests[request])[page].clone()

        def wrong(batch: Any, row: int, new: slice) -> None:
            self._row(self._requests[request])[page] = self._row(self._requests[other])[page]

        def restore() -> None:
            self._row(self._requests[request])[page] = right

        self._before_forward(request, wrong, restore)

    def spoil_store(self, layer: int, half: str, request: str) -> None:
        """The bug of a stray write: it hits what a layer has just stored."""
        pool = self._pool
        (method,) = [name for name in ("set_kv_buffer", "set_mla_kv_buffer") if hasattr(pool, name)][-1:]

        def wrong(stored: Any, *args: Any, **kwargs: Any) -> None:
            getattr(type(pool), method)(pool, stored, *args, **kwargs)
            if stored.layer_id == layer:
                delattr(pool, method)
                running = self._requests[request]
                self.poke(layer, half, request, len(running.origin_input_ids) + len(running.output_ids) - 1)

        setattr(pool, method, wrong)

    def submit_as(self, identity: str, request: str, tokens: Sequence[int], new_tokens: int) -> None:
        """Queues a request with a key of its own in the prefix cache, as each LoRA adapter and salt has."""
        self._requests[request] = self._engine.submit(list(tokens), new_tokens, request, identity)

    def mix_identities(self) -> None:
        """The bug of a prefix cache whose keys lack the identity."""
        self._key = right = _radix_key().__init__
        first = next(r.extra_key for r in self._requests.values() if r.extra_key is not None)

        def make(key: Any, *args: Any, **kwargs: Any) -> None:
            right(key, *args, **kwargs)
            key.extra_key = first

        _radix_key().__init__ = make

    def change_weights(self, kept: bool) -> None:
        """SGLang's own update; then its flush of the prefix cache, unless it is forgotten."""
        self._engine.step()
        update(self._engine)
        if not kept and not self._scheduler.flush_cache():
            raise RuntimeError("SGLang could not flush its prefix cache")

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

    def _before_forward(
        self, request: str, change: Callable[[Any, int, slice], None], restore: Callable[[], None] = lambda: None
    ) -> None:
        """``change`` breaks the next `ForwardBatch` with the request, given it, its row and where its new tokens are;
        ``restore`` comes after that forward."""
        runner = self._engine.runner

        def wrong(*args: Any, **kwargs: Any) -> Any:
            batch = args[0] if args else kwargs["forward_batch"]
            if request not in batch.rids:
                return type(runner).forward(runner, *args, **kwargs)
            del runner.forward
            row = batch.rids.index(request)
            news = [1] * len(batch.rids) if batch.forward_mode.is_decode() else batch.extend_seq_lens.tolist()
            change(batch, row, slice(sum(news[:row]), sum(news[: row + 1])))
            try:
                return type(runner).forward(runner, *args, **kwargs)
            finally:
                restore()

        runner.forward = wrong

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


def _radix_key() -> Any:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return RadixKey
