"""The engine for the conformance suite: driven from outside of Canary and of the adapter."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from canary_core.testing import ABILITIES, EngineSession, PluginConformance
from canary_toy import plugin
from canary_toy.toy_engine import LAYERS, PAGE, Batch, Engine, Request

HALVES = ("k", "v")


class ToySession(EngineSession):
    """A fresh engine, under whatever hooks are installed. Its own tables and tensors say where KV is."""

    def __init__(self) -> None:
        self.engine = Engine()

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
        """The bug of a wrong slot mapping: the request's last new token goes to the slot before its own."""
        engine, right = self.engine, self.engine._batch

        def wrong(scheduled: Sequence[tuple[Request, int]]) -> Batch:
            engine._batch = right  # type: ignore[method-assign]
            batch = right(scheduled)
            row = [r.name for r, _ in scheduled].index(request)
            batch.slot_mapping[batch.new_lens.cumsum(0)[row] - 1] -= 1
            return batch

        engine._batch = wrong  # type: ignore[method-assign]

    def release_running(self, request: str) -> None:
        """The bug of a free too many: the pages of a running request go back to the allocator."""
        running = self.engine.requests[request]
        self.engine.allocator.free([page for page in running.pages if page not in self.engine.cache.hashes])

    def release_again(self, request: str) -> None:
        """The bug of a double release: cached pages of a finished request are let go once more."""
        self.engine.release(self.engine.cache.match(self.engine.requests[request].tokens))

    def hand_out_cached(self) -> None:
        """The bug of a lost eviction: a cached page is in the free list, and so is handed out."""
        self.engine.allocator.free_pages.append(next(iter(self.engine.cache.parked)))
        self.engine.allocator.allocate(1)


class ToyConformance(PluginConformance):
    """What Canary asks of every plugin; ``canary check-plugin toy`` runs it, and so does tests/test_conformance.py."""

    plugin = plugin
    layers, halves = LAYERS, HALVES
    abilities = frozenset(ABILITIES)
    engine_package = "canary_toy.toy_engine"

    def session(self) -> EngineSession:
        """A fresh engine."""
        return ToySession()
