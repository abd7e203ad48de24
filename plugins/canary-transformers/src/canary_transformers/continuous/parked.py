"""`LedgerPrefixes`: KV of ended requests in continuous batching's prefix cache, remembered to be computed again."""

import functools
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from canary_adapters import (
    LEAST_TOKENS,
    UNKNOWN_PREFIX,
    ParkedPrefix,
    ParkedPrefixes,
    error_text,
    recompute_off,
    upload,
)
from canary_core import CachedRequest, Canary, HookTarget, Patches, Questions, Verification
from canary_transformers.continuous import compat
from canary_transformers.continuous.recompute import ContinuousRecomputer, GaveWayError

if TYPE_CHECKING:
    from canary_core import Recompute

ENDED = "the manager ended, or Canary was switched off"


def unable(processor: Any, groups: Sequence[compat.KVGroup]) -> str | None:
    """The reason against following prefixes of a `ContinuousBatchProcessor`'s ended requests; None for none."""
    cache = processor.cache
    if not hasattr(cache, "cache_allocators"):
        return "this Transformers has no ledger of blocks to look them up in; install 5.18 or later"
    if len(groups) != 1 or groups[0].window_tokens is not None:
        return "the model has layers with a window, and such a cache keeps no prefixes"
    if not cache.use_prefix_sharing:
        return "the prefix cache is off (allow_block_sharing)"
    if processor.distributed_helper.tp_size > 1:
        return "ranks of tensor parallelism would have to recompute together"
    hooked = [
        (processor.scheduler, "finish_request", ("request_id",)),
        (processor.scheduler, "clear_cancelled_requests", ()),
        (next(iter(cache.cache_allocators.values())), "match_prefix_blocks", ("prompt_ids",)),
    ]
    targets = [(owner, HookTarget(f"{type(owner).__name__}.{name}", names)) for owner, name, names in hooked]
    return next((problem for owner, target in targets if (problem := target.problem(owner))), None)


@dataclass(slots=True, eq=False, kw_only=True)
class LedgerPrefix(ParkedPrefix):
    """``hashes``: the engine's own, of each block of `content`, looked up anew each time in the tables of the
    allocator's ledger, like a hit's: nothing there changes. A block may be another one than the request's, written by
    another request with the same tokens."""

    allocator: Any
    hashes: Sequence[int] = field(repr=False)

    def left(self) -> int:
        """See `ParkedPrefix`."""
        return len(self.blocks()[0]) * int(self.allocator.tokens_per_page)

    def blocks(self) -> Sequence[Sequence[int]]:
        """Of the one group, from the first on, as far as they are left."""
        found = map(self.allocator.ledger.hash_to_block.get, self.hashes)
        return [list(takewhile(lambda block: block is not None, found))]


class LedgerPrefixes:
    """Follows the prefixes left by requests in the cache of ``processor``, an able one (`unable`). Computes each
    again on demand, or with nobody to serve, within the share of ``CANARY_RECOMPUTE``.

    group: the only one. recomputer, recompute: of the engine; the latter is made on the first call.
    """

    def __init__(
        self,
        canary: Canary,
        processor: Any,
        group: compat.KVGroup,
        recomputer: ContinuousRecomputer,
        recompute: Callable[[], "Recompute"],
    ) -> None:
        self._canary, self._processor, self._group = canary, processor, group
        (self._allocator,) = processor.cache.cache_allocators.values()
        self._device = torch.device(processor.cache.device)
        self._recomputer, self._recompute = recomputer, recompute
        self.known = ParkedPrefixes.of_cache(self._allocator.num_blocks * group.block_slots)
        self._share = canary.config.recompute.share
        self.asked = Questions()
        """For one prefix, or (None) for all."""

    def follow(self, patches: Patches) -> None:
        """Hooks the ends of requests."""
        patches.wrap(self._processor.scheduler, "finish_request", self._finishes)
        patches.follow(self._processor.scheduler, "clear_cancelled_requests", self._cancelled)

    @property
    def due(self) -> bool:
        """Whether `serve` has something to do."""
        return bool(self.asked) or (self._share > 0 and self._idle() and not self._recompute().budget.rests)

    def serve(self) -> None:
        """Computes one prefix again. On the engine's thread and stream, between forwards; never raises."""
        if self.asked:
            self.asked.step(self._answers)
            return
        try:
            self._prove()
        except Exception as error:
            self._share = 0.0
            self._canary.tell(recompute_off(f"the recompute failed: {error_text(error)}", "error"))

    def close(self) -> None:
        """Nothing is answered any more."""
        self.asked.close(ENDED)

    def _answers(self, request: str | None) -> Iterator[Verification]:
        every = [name for name in self.known.names() if not self._runs(name)]
        return map(self._verify, every if request is None else [request])

    def _prove(self) -> None:
        """The least recently proven prefix of which enough is left."""
        budget = self._recompute().budget
        if not self._share or budget.rests or not self._idle():
            return
        began = time.perf_counter()
        able = (one for one in self.known.by_proof() if not self._runs(one.name) and one.left() >= LEAST_TOKENS)
        prefix = next(able, None)
        if prefix is not None:
            self._recomputer.stops = lambda: not self._idle()
            try:
                self._verify(prefix.name)
            except GaveWayError:
                self._canary.count("recompute_gave_way")
            finally:
                self._recomputer.stops = None
            self._canary.count("recompute_ms", round(1000 * (time.perf_counter() - began)))
        budget.spent(time.perf_counter() - began)

    def _verify(self, name: str) -> Verification:
        prefix = None if self._runs(name) else self.known.get(name)
        if not isinstance(prefix, LedgerPrefix):
            return replace(self._recompute().judge.unjudged(name, UNKNOWN_PREFIX), parked=True)
        self.known.proven(prefix)
        return self._recompute().judged(self._cached(prefix))

    def _cached(self, prefix: LedgerPrefix) -> CachedRequest:
        """The blocks left now."""
        (blocks,) = prefix.blocks()
        size = self._group.block_slots
        slots = upload([block * size + place for block in blocks for place in range(size)], self._device)
        tokens = list(prefix.content[: len(slots)])
        return CachedRequest(prefix.name, tokens, {self._group.name: slots}, prefix.touches, len(prefix.content))

    def _idle(self) -> bool:
        """Whether nobody is to be served, as far as the engine or its queue of new requests knows."""
        queue = self._processor.input_queue
        return not self._processor.scheduler.has_pending_requests() and (queue is None or queue.empty())

    def _runs(self, name: str) -> bool:
        """Whether the request runs, or will after a preemption."""
        scheduler = self._processor.scheduler
        return name in scheduler.active_requests or name in scheduler.waiting_requests

    def _finishes(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def finish_request(request_id: str, *args: Any, **kwargs: Any) -> Any:
            with self._canary.guard("canary_transformers: parked"):
                state = self._processor.scheduler.active_requests.get(request_id)
                if state is not None:
                    self._ended(state, self._allocator.block_table.get(request_id, ()))
            return original(request_id, *args, **kwargs)

        return finish_request

    def _cancelled(self, states: Sequence[Any]) -> None:
        """Their block tables are gone already."""
        for state in states:
            tokens = [*state.initial_tokens, *state.generated_tokens]
            self._ended(state, self._allocator.match_prefix_blocks(tokens))

    def _ended(self, state: Any, blocks: Sequence[int]) -> None:
        hashed = map(self._allocator.ledger.block_to_hash.get, blocks)
        hashes = array("Q", takewhile(lambda known: known is not None, hashed))
        count = len(hashes) * self._group.block_slots
        content = array("i", [*state.initial_tokens, *state.generated_tokens][:count])
        touches = self._recomputer.touches(state)
        self.known.add(
            LedgerPrefix(
                name=state.request_id, content=content, touches=touches, allocator=self._allocator, hashes=hashes
            )
        )  # fmt: skip
        for name, number in self.known.counted().items():
            self._canary.count(name, number)
