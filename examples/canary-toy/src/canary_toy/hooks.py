"""Where Canary is called: around each forward, and wherever pages change hands between forwards."""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from canary_adapters import put_embeddings
from canary_core import BatchView, Canary, CanaryConfig, Patches, attach
from canary_toy.batch import ToyBatch
from canary_toy.pool import REGION, ToyPool
from canary_toy.toy_engine import PAGE, Batch, Engine, Request


class ToyGuard:
    """Guards one engine until `close`."""

    def __init__(self, engine: Engine, config: CanaryConfig) -> None:
        pool = ToyPool(engine.pool)
        self.canary = Canary(pool.regions(), config, uncovered=pool.uncovered(), pool_tensors=pool.pool_tensors)
        self._batch = ToyBatch(engine.runner, self.canary.writers)
        # By the engine's own books, not by a hook: so it shows where a forward runs past the hooks.
        self.canary.witness.follow(lambda: engine.computed_tokens)
        # With the guard, an exception of what follows a function of the engine never reaches the engine in log mode.
        self._patches = Patches(self.canary.guard)
        self._patches.wrap(engine.runner, "forward", self._guarded)
        slots = self.canary.slots
        self._patches.follow(engine.allocator, "allocate", lambda pages, count: self._tell(slots.alloc, pages))
        self._patches.follow(engine.allocator, "free", lambda _, pages: self._tell(slots.free, pages))
        self._patches.follow(engine.cache, "take", lambda _, pages: self._tell(slots.share, pages))
        self._patches.follow(engine.cache, "park", lambda _, pages: self._tell(slots.park, pages))
        self._patches.follow(engine.cache, "evict", lambda pages: self._tell(slots.evict, pages))
        self._patches.follow(engine.pool, "copy_page", self._copied)
        if self.canary.step.stores.on:
            self._patches.follow(engine.pool, "store", lambda _, layer, *new: self.canary.step.stored(layer))
        self.canary.sampled.follow()
        self._patches.follow(engine, "roll_back", self._rolled_back)
        # Before the prefix cache is flushed, and whether or not.
        self._patches.follow(
            engine.runner, "update_weights", lambda *_: self.canary.step.weights_changed("update_weights")
        )
        self._patches.follow(engine, "submit", self._named)
        self._patches.follow(engine, "fork", self._named)

    def close(self) -> None:
        """Reports what is left to report; the engine's methods are its own again. Raises `ViolationError` in raise
        mode."""
        self._patches.undo()
        self.canary.close()

    def _guarded(self, forward: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        @wraps(forward)
        def guarded(batch: Batch) -> Tensor:
            tokens = self.canary.step.run(partial(forward, batch), partial(self._view, batch), batch=batch)
            self.canary.sampled.give(self._batch.sampled(batch, tokens))
            return tokens

        return guarded

    def _view(self, batch: Batch) -> BatchView:
        view = self._batch.view(batch)
        if self.canary.step.tables.due:
            self.canary.step.tables.compare([self._batch.read_table(batch, view)])
        return view

    def _tell(self, event: Callable[..., None], pages: Sequence[int]) -> None:
        event(REGION, torch.tensor(pages, dtype=torch.int64, device=self.canary.device), page_slots=PAGE)

    def _copied(self, _: None, source: int, destination: int) -> None:
        self.canary.slots.copy(REGION, self._slots(source), self._slots(destination))

    def _rolled_back(self, _: None, request: Request, tokens: int) -> None:
        """Pages that were dropped are told as freed or parked; what was dropped of the last page holds nothing."""
        kept = request.computed % PAGE
        if kept:
            self.canary.slots.clear(REGION, self._slots(request.pages[-1])[kept:])

    def _named(self, request: Request, *arguments: Any, **more: Any) -> None:
        """A request may have the name of an earlier one: what is known of that one's sequence is not true of it."""
        self.canary.writers.forget(request.name)
        self.canary.writers.identify(request.name, cache_salt=request.salt or None)
        if request.embeds is not None:
            put_embeddings(self.canary.writers, request.name, range(len(request.embeds)), request.embeds)

    def _slots(self, page: int) -> Tensor:
        return torch.arange(page * PAGE, (page + 1) * PAGE, device=self.canary.device)


class ToyHooks:
    """Guards every engine that is made from `install` to `uninstall`."""

    def __init__(self) -> None:
        self._patches = Patches()
        self.guards: list[ToyGuard] = []

    def install(self, config: CanaryConfig) -> None:
        """Again: does nothing."""

        def made(_: None, engine: Engine, *arguments: Any, **more: Any) -> None:
            guard = attach("attach to toy", config, lambda: ToyGuard(engine, config))
            if guard is not None:
                self.guards.append(guard)

        if not self._patches.done:
            self._patches.follow(Engine, "__init__", made)

    def uninstall(self) -> None:
        """Again: does nothing. Raises `ViolationError` in raise mode, for what is found only now."""
        self._patches.undo()
        while self.guards:
            self.guards.pop().close()


HOOKS = ToyHooks()
"""Those of this process."""
