"""Where Canary is called: around each forward, and wherever blocks change hands between forwards."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from canary_core import BatchView, Canary, CanaryConfig, Patches, attach
from canary_mini_infer.batch import Forward, MiniBatch
from canary_mini_infer.pool import REGION, MiniPool


class MiniGuard:
    """Guards one ``engine``, a `mini_infer.InferenceEngine`, until `close`."""

    def __init__(self, engine: Any, config: CanaryConfig) -> None:
        pool = MiniPool(engine.block_pool)
        self.canary = Canary(pool.regions(), config, uncovered=pool.uncovered(), pool_tensors=pool.pool_tensors)
        self._pool, self._cache, self._page = engine.block_pool, engine.prefix_cache, engine.block_pool.block_size
        self._view, self._patches = MiniBatch(self._page, self.canary.writers).view, Patches(self.canary.guard)
        self._prompts, self._decodes, self._parked = deque[Any](), list[Any](), set[int]()
        self._chunk, self._open, self._step = (torch.empty(0), torch.empty(0)), False, self.canary.step
        follow, step, writers = self._patches.follow, self._step, self.canary.writers
        self._patches.wrap(engine.model, "forward", self._modelled)
        self._patches.wrap(self._pool, "write_sequence_kv", self._stored)
        follow(engine.scheduler, "schedule", self._scheduled)
        # A request may have the name of an earlier one.
        follow(engine.scheduler, "add_sequence", lambda _, sequence: writers.forget(sequence.request_id))
        follow(self._pool, "allocate_block", lambda block: self._tell(self.canary.slots.alloc, [block]))
        follow(self._pool, "free_block", self._released)
        if self._cache is not None:
            follow(self._cache, "match_prefix", self._hit)
        if step.stores.on:
            # A decode stores a layer row by row, and gathers it once all rows are there.
            follow(self._pool, "gather_batched_paged_kv", lambda _, layer_idx, *rest: step.stored(layer_idx))
        # By the engine's answers, not by a hook of forwards: each was computed from one token at least.
        follow(engine, "step", lambda answered: self.canary.witness.computed(len(answered)))

    def close(self) -> None:
        """Reports what is left to report; the engine's methods are its own again. Raises `ViolationError` in raise
        mode."""
        self._patches.undo()
        self.canary.close()

    def _modelled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A decode reads and writes the pool within the model. A prompt's chunk reads KV of the request's own instead,
        and is stored in the pool afterwards; so what was computed is kept until then."""

        @wraps(forward)
        def guarded(input_ids: Tensor, **given: Any) -> Any:
            if given.get("block_pool") is self._pool:
                return self._step.run(partial(forward, input_ids, **given), partial(self._decode, input_ids, given))
            past, positions = given.get("past_key_values"), given.get("position_ids")
            if positions is None:
                begin = past[0][0].shape[2] if past else 0
                positions = torch.arange(begin, begin + input_ids.shape[1], device=input_ids.device)
            self._chunk = input_ids.flatten(), positions.flatten()
            return forward(input_ids, **given)

        return guarded

    def _decode(self, input_ids: Tensor, given: Mapping[str, Any]) -> BatchView:
        # Under pressure the last ones were preempted after they were scheduled.
        requests = [r for r in self._decodes if r.status.name == "RUNNING"][: len(input_ids)]
        prefix, positions = [length - 1 for length in given["context_lens"]], given.get("position_ids")
        positions = torch.tensor(prefix, device=input_ids.device) if positions is None else positions.flatten()
        slots = [block * self._page + offset for block, offset in given["slot_mapping"]]
        tokens, new = input_ids.flatten(), [1] * len(requests)
        return self._view(Forward(requests, tokens, positions, prefix, new, given["block_tables"], slots))

    def _stored(self, store: Callable[..., None]) -> Callable[..., None]:
        """A prompt's chunk is stored layer by layer, and was computed from none of what lies in the pool."""

        @wraps(store)
        def stored(layer_idx: int, **given: Any) -> None:
            if layer_idx == 0:
                with self.canary.guard("view of a prompt"):
                    self._step.before(self._prefill(given))
                    self._open = True
            store(layer_idx=layer_idx, **given)
            if self._open:
                self._step.stored(layer_idx)
            if self._open and layer_idx == self._pool.num_layers - 1:
                self._open = False
                self._step.after()
                self._step.end()

        return stored

    def _prefill(self, given: Mapping[str, Any]) -> BatchView:
        (tokens, positions), request = self._chunk, self._prompts.popleft()
        table, blocks = request.block_table, given["physical_block_ids"]
        new, end = len(tokens), given["start_token_idx"] + given["k_seq"].shape[1]
        slots = [blocks[at // self._page] * self._page + at % self._page for at in range(end - new, end)]
        prefix, own = [table.num_tokens - new], [table.physical_block_ids]
        return self._view(Forward([request], tokens, positions, prefix, [new], own, slots))

    def _scheduled(self, result: tuple[list[Any], list[Any]]) -> None:
        self._prompts, self._decodes = deque(result[0]), result[1]
        if self._open:
            # A store failed, and the engine's step with it.
            self._open = False
            self._step.abandon()

    def _hit(self, found: tuple[list[int], int], *arguments: Any) -> None:
        self._parked.difference_update(found[0])
        self._tell(self.canary.slots.share, found[0])

    def _released(self, _: None, block_id: int) -> None:
        """A block in the prefix cache has one holder more, the cache. An eviction takes it out of there first."""
        holders, slots = self._pool.ref_counts[block_id], self.canary.slots
        cached, parked = self._cache and block_id in self._cache.last_accessed, block_id in self._parked
        if holders == 1 and cached:
            self._parked.add(block_id)
            self._tell(slots.park, [block_id])
        elif holders == 0:
            self._parked.discard(block_id)
            self._tell(slots.evict if parked and not cached else slots.free, [block_id])

    def _tell(self, event: Callable[..., None], blocks: Sequence[int]) -> None:
        if blocks:
            event(REGION, torch.tensor(blocks, device=self.canary.device), page_slots=self._page)


class MiniHooks:
    """Guards every engine that is made from `install` to `uninstall`."""

    def __init__(self) -> None:
        self._patches = Patches()
        self.guards: list[MiniGuard] = []

    def install(self, config: CanaryConfig) -> None:
        """Again: does nothing."""
        from mini_infer import InferenceEngine

        def made(_: None, engine: InferenceEngine, *arguments: Any, **more: Any) -> None:
            self.guards.extend(
                filter(None, [attach("attach to mini-infer", config, lambda: MiniGuard(engine, config))])
            )

        if not self._patches.done:
            self._patches.follow(InferenceEngine, "__init__", made)

    def uninstall(self) -> None:
        """Again: does nothing. Raises `ViolationError` in raise mode, for what is found only now."""
        self._patches.undo()
        while self.guards:
            self.guards.pop().close()


HOOKS = MiniHooks()
"""Those of this process."""
