"""The engine for the conformance suite: driven from outside of Canary and of the adapter."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from canary_core.testing import ABILITIES, EngineSession, PluginConformance
from canary_toy import plugin
from canary_toy.toy_engine import DIM, HEADS, LAYERS, PAGE, Batch, Engine, Request

HALVES = ("k", "v")
Change = Callable[[Batch, int, slice], None]
"""Breaks a batch, at a row with these new tokens."""


class ToySession(EngineSession):
    """A fresh engine, under whatever hooks are installed. Its own tables and tensors say where KV is."""

    def __init__(self) -> None:
        self.engine = Engine()
        self._changes: dict[str, Change] = {}
        self._updates = 0

    def pool_tensors(self) -> Mapping[str, Tensor]:
        """The two layers' tensors."""
        return {f"layers.{i}": tensor for i, tensor in enumerate(self.engine.pool.layers)}

    def submit(self, request: str, tokens: Sequence[int], new_tokens: int) -> None:
        """Queues a request."""
        self.engine.submit(request, tokens, new_tokens)

    def step(self) -> bool:
        """Runs one forward; False if there was nothing to run."""
        return self.engine.step()

    def answer(self, request: str) -> Sequence[int]:
        """The tokens that were generated so far."""
        return self.engine.requests[request].answer

    def poke(self, layer: int, half: str, request: str, position: int) -> None:
        """Flips one bit of that KV, found through the engine's block table."""
        row = self.engine.requests[request].row
        page = self.engine.block_tables[row, position // PAGE]
        self.engine.pool.layers[layer][HALVES.index(half)].view(torch.int32)[page, position % PAGE, 0, 0] ^= 1 << 20

    def close(self) -> None:
        """Ends all requests."""
        for request in self.engine.requests.values():
            self.engine.abort(request)

    def evict(self) -> None:
        """Empties the prefix cache of what nobody holds."""
        while self.engine.cache.evict():
            pass

    def preempt(self, request: str) -> None:
        """Takes a running request's pages."""
        self.engine.preempt(self.engine.requests[request])

    def fork(self, request: str, child: str) -> None:
        """``child`` goes on from a running request."""
        self.engine.fork(self.engine.requests[request], child)

    def roll_back(self, request: str, tokens: int) -> None:
        """Drops the last tokens of a running request; the engine computes them again."""
        self.engine.roll_back(self.engine.requests[request], tokens)

    def misplace_write(self, request: str) -> None:
        """The bug of a wrong slot mapping: the last new token goes to another slot of its own page."""

        def wrong(batch: Batch, row: int, new: slice) -> None:
            batch.slot_mapping[new.stop - 1] ^= 1

        self._once(request, wrong)

    def misfeed(self, request: str) -> None:
        """The bug of a token that is another's."""

        def wrong(batch: Batch, row: int, new: slice) -> None:
            batch.token_ids[new.stop - 1] ^= 1

        self._once(request, wrong)

    def shift_positions(self, request: str) -> None:
        """The bug of positions that count from one."""

        def wrong(batch: Batch, row: int, new: slice) -> None:
            batch.positions[new] += 1

        self._once(request, wrong)

    def miscount(self, request: str, tokens: int) -> None:
        """The bug of a length that the device has wrong."""

        def wrong(batch: Batch, row: int, new: slice) -> None:
            batch.prefix_lens[row] += tokens

        self._once(request, wrong)

    def misplace_read(self, request: str, position: int, other: str) -> None:
        """The bug of a block table that has another's page."""

        def wrong(batch: Batch, row: int, new: slice) -> None:
            page = self.engine.requests[other].pages[position // PAGE]
            self.engine.block_tables[batch.rows[row], position // PAGE] = batch.pages[row, position // PAGE] = page

        self._once(request, wrong)

    def misread(self, request: str) -> None:
        """The bug of pages for attention that are not those of the block table."""

        def wrong(batch: Batch, row: int, new: slice) -> None:
            batch.pages[row, 0] ^= 1

        self._once(request, wrong)

    def keep_stale(self, request: str) -> None:
        """The bug of a graph's buffer that was not filled."""
        runner, right = self.engine.runner, self.engine.runner.load

        def wrong(batch: Batch) -> Batch:
            runner.load = right  # type: ignore[method-assign]
            loaded = right(batch)
            last = _new(batch, [r.name for r in batch.requests].index(request)).stop - 1
            loaded.token_ids[last] = batch.token_ids[last] ^ 1
            return loaded

        runner.load = wrong  # type: ignore[method-assign]

    def spoil_store(self, layer: int, half: str, request: str) -> None:
        """The bug of another layer's store that runs on: it hits what was just stored."""
        pool, right = self.engine.pool, self.engine.pool.store

        def wrong(stored: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
            right(stored, slots, keys, values)
            if stored == layer:
                pool.store = right  # type: ignore[method-assign]
                self.poke(layer, half, request, self.engine.requests[request].computed)

        pool.store = wrong  # type: ignore[method-assign]

    def miscopy(self, layer: int, half: str) -> None:
        """The bug of a copy that forgets one part."""
        pool, right = self.engine.pool, self.engine.pool.copy_page

        def wrong(source: int, destination: int) -> None:
            pool.copy_page = right  # type: ignore[method-assign]
            part = pool.layers[layer][HALVES.index(half)]
            before = part[destination].clone()
            right(source, destination)
            part[destination] = before

        pool.copy_page = wrong  # type: ignore[method-assign]

    def submit_as(self, identity: str, request: str, tokens: Sequence[int], new_tokens: int) -> None:
        """Queues a request with a cache salt."""
        self.engine.submit(request, tokens, new_tokens, salt=identity)

    def submit_embedded(self, seed: int, request: str, tokens: Sequence[int], new_tokens: int) -> None:
        """Queues a request of which the first half is embeddings."""
        draw = torch.Generator().manual_seed(seed)
        embeds = torch.randn(len(tokens) // 2, HEADS * DIM, generator=draw)
        self.engine.submit(request, tokens, new_tokens, embeds=embeds)

    def mix_contents(self) -> None:
        """The bug of a key that has the placeholder tokens only: any request hits what the first ones left."""
        kept = [
            request.keys[: len(request.embeds)]
            for request in self.engine.requests.values()
            if request.embeds is not None
        ]
        right = self.engine.cache.match
        self.engine.cache.match = (
            lambda keys, salt: max(  # type: ignore[method-assign]
                (right([*other, *keys[len(other) :]], salt) for other in kept), key=len
            )
        )

    def mix_identities(self) -> None:
        """The bug of a key without the salt: any request hits what the first ones left."""
        salts = {request.salt for request in self.engine.requests.values()}
        right = self.engine.cache.match
        self.engine.cache.match = lambda tokens, salt: max(  # type: ignore[method-assign]
            (right(tokens, other) for other in salts), key=len
        )

    def change_weights(self, kept: bool) -> None:
        """The engine's own update, by a trainer that may keep the prefix cache."""
        self._updates += 1
        self.engine.update_weights(self._updates, flush_cache=not kept)

    def release_running(self, request: str) -> None:
        """The bug of a free too many: the pages of a running request go back to the allocator."""
        running = self.engine.requests[request]
        self.engine.allocator.free([page for page in running.pages if page not in self.engine.cache.hashes])

    def release_again(self, request: str) -> None:
        """The bug of a double release: cached pages of a finished request are let go once more."""
        self.engine.release(self.engine.cache.match(self.engine.requests[request].tokens))

    def hand_out_cached(self) -> None:
        """The bug of a lost eviction: a cached page is in the free list, and so is handed out."""
        allocator = self.engine.allocator
        # Alone there for the moment: whichever page is taken first, it is this one.
        others, allocator.free_pages = allocator.free_pages, [next(iter(self.engine.cache.parked))]
        allocator.allocate(1)
        allocator.free_pages = others

    def _once(self, request: str, change: Change) -> None:
        """``change`` breaks the next batch that has the request."""
        self._changes[request] = change
        engine, right = self.engine, type(self.engine)._batch

        def wrong(scheduled: Sequence[tuple[Request, int]]) -> Batch:
            batch = right(engine, scheduled)
            for row, (scheduled_one, _) in enumerate(scheduled):
                broken = self._changes.pop(scheduled_one.name, None)
                if broken is not None:
                    broken(batch, row, _new(batch, row))
            return batch

        engine._batch = wrong  # type: ignore[method-assign]


def _new(batch: Batch, row: int) -> slice:
    """The new tokens of a row, in lists by token."""
    end = int(batch.new_lens[: row + 1].sum())
    return slice(end - int(batch.new_lens[row]), end)


class ToyConformance(PluginConformance):
    """What Canary asks of every plugin; ``canary check-plugin toy`` runs it, and so does tests/test_conformance.py."""

    plugin = plugin
    layers, halves = LAYERS, HALVES
    abilities = frozenset(ABILITIES)
    engine_package = "canary_toy.toy_engine"

    def session(self) -> EngineSession:
        """A fresh engine."""
        return ToySession()
