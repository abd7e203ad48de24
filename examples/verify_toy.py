"""Have requests of an engine of your own computed again: what the cache holds against what the model computes now.

    PYTHONPATH=examples/canary-toy/src python examples/verify_toy.py

The toy engine, guarded by its plugin, gets a `ToyRecomputer`. Requests are verified while they run; then the weights
change, the prefix cache is kept by mistake, and the next request that hits it is told, by layer and position.
"""

import copy
import random
from collections.abc import Mapping, Sequence

import torch
from canary_toy.hooks import ToyGuard
from canary_toy.pool import REGION, ToyPool
from canary_toy.toy_engine import CHUNK, DIM, HEADS, PAGE, Batch, Engine, KVPool, ModelRunner, Request
from torch import Tensor

from canary_core import CachedRequest, CanaryConfig, CanaryError, Computed, Patches, Recompute, Recomputer, Touch


class ToyRecomputer(Recomputer):
    """By the engine's own model, on the engine's thread between two forwards. ``patches``: followed to learn where the
    content of requests comes from."""

    def __init__(self, engine: Engine, patches: Patches) -> None:
        self._engine = engine
        self._touched: dict[str, int] = {}
        patches.follow(engine, "_start", self._started)

    def _started(self, _: None, request: Request, pages: Sequence[int], computed: int) -> None:
        """A hit, or a fork, brings the first ``computed`` tokens."""
        self._touched[request.name] = computed

    def requests(self) -> Sequence[str]:
        """The running ones with tokens in the pool."""
        return [request.name for request in self._engine.running if request.computed]

    def cached(self, request: str) -> CachedRequest:
        """Its tokens, and their slots by its block table."""
        running = self._engine.requests.get(request)
        if running is None or not running.computed:
            raise CanaryError(f"request {request!r} has nothing in the pool")
        if running.embeds is not None:
            raise CanaryError("embeddings stand in the place of tokens")
        end = self._touched.get(request, 0)
        touches = [Touch("hit", min(end, running.computed))] if end else []
        pages = torch.tensor(running.pages, device=self._engine.device)
        return CachedRequest(
            request, running.tokens[: running.computed], {REGION: _slots(pages, running.computed)}, touches
        )

    @property
    def rounding(self) -> float:
        """Products of matrices sum up so many numbers in 32 bits."""
        return float(torch.finfo(torch.float32).eps / 2 * (HEADS * DIM) ** 0.5)

    def compute(
        self, request: CachedRequest, chunk_tokens: int, jitter: float = 0.0, observer: object = None
    ) -> Mapping[str, Computed]:
        """In chunks, without a row of the engine's block tables."""
        engine, tokens = self._engine, request.tokens
        pages = torch.arange(-(-len(tokens) // PAGE), device=engine.device)
        pool = ScratchPool(len(pages), jitter, engine.device)
        # With the present weights; what guards the engine's own forward is not in the way.
        runner = copy.copy(engine.runner)
        runner.pool = pool
        slots = _slots(pages, len(tokens))
        for begin in range(0, len(tokens), min(chunk_tokens, CHUNK)):
            end = min(begin + min(chunk_tokens, CHUNK), len(tokens))
            numbers = torch.tensor([[0], [begin], [end - begin]], device=engine.device)
            new = torch.tensor(tokens[begin:end], device=engine.device), torch.arange(begin, end, device=engine.device)
            batch = Batch([Request(request.request, [], 0, 0)], *numbers, pages[None], *new, slots[begin:end])
            ModelRunner.forward(runner, batch)
        (region,) = ToyPool(pool.computed).regions()
        return {REGION: Computed(tuple(region.sources), slots)}


class ScratchPool(KVPool):
    """What attention reads here has each number off by up to ``jitter``; ``computed`` has what was stored."""

    def __init__(self, pages: int, jitter: float, device: torch.device) -> None:
        super().__init__(pages, device)
        self.computed = KVPool(pages, device)
        self._jitter, self._draw = jitter, torch.Generator().manual_seed(0)

    def store(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """K and V of new tokens."""
        self.computed.store(layer, slots, keys, values)
        super().store(layer, slots, self._off(keys), self._off(values))

    def _off(self, numbers: Tensor) -> Tensor:
        factors = 1 + self._jitter * (2 * torch.rand(numbers.shape, generator=self._draw) - 1)
        return numbers * factors.to(numbers.device)


def _slots(pages: Tensor, tokens: int) -> Tensor:
    """Of the first ``tokens`` tokens in ``pages``."""
    return (pages[:, None] * PAGE + torch.arange(PAGE, device=pages.device)).flatten()[:tokens]


def main() -> None:
    """Prints an answer for each request, and the one about the weights with its figures by layer."""
    engine, draw = Engine(400), random.Random(0)
    guard = ToyGuard(engine, CanaryConfig.load())
    recompute = Recompute(guard.canary, ToyRecomputer(engine, Patches(guard.canary.guard)))
    prompts = [[draw.randrange(1, 256) for _ in range(50)] for _ in range(6)]
    for i, prompt in enumerate(prompts):
        request = engine.submit(f"request {i}", prompt, 8)
        while len(request.answer) < 7:
            engine.step()
        # Between two forwards, on the engine's thread. From other threads: `verify`.
        (answer,) = recompute.now(request.name)
        print(f"{answer.request}: {answer.verdict}")
        engine.step()
    engine.update_weights(7, flush_cache=False)
    request = engine.submit("request 6", [*prompts[0], 50], 4)
    while not request.answer:
        engine.step()
    (answer,) = recompute.now(request.name)
    print(answer.table())
    guard.close()


if __name__ == "__main__":
    main()
