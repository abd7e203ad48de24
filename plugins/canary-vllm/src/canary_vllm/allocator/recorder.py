"""`BlockRecorder`: records one scheduler's actions on its blocks, in the scheduler's process."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from canary_adapters import (
    AnswerLists,
    BlockEvent,
    BlockLoad,
    BlockMessage,
    BlockSort,
    Sheltered,
    add_event,
    error_text,
    follow_releases,
)
from canary_core import Event, Patches, emit
from canary_vllm.allocator import messages
from canary_vllm.batches.contents import loaded
from canary_vllm.prefix_cache.structure import sweep
from canary_vllm.weights import adapter_name


class BlockRecorder:
    """Follows the block pool of one scheduler until `close`.

    | vLLM's call                                                      | event                                      |
    |------------------------------------------------------------------|--------------------------------------------|
    | `get_new_blocks`                                                 | alloc                                      |
    | `touch`: a prefix hit, of blocks with or without a holder        | share; forget if they are cached only      |
    |                                                                  | since this call of `schedule`              |
    | `free_blocks`, of a block without a holder afterwards            | park if its hash is known, else free       |
    | `_maybe_evict_cached_block` of a block without a holder          | evict                                      |
    | `reset_prefix_cache`                                             | evict, of all cached ones                  |
    | `reset_cache` of a connector (not of several) after that         | none, but the ledger's `emptied`           |
    | `allocate_slots` with tokens of a connector                      | none, but a load                           |

    Preemption and abort free blocks in the same way. Every ``sweep_interval`` outputs the pool's structure is checked.
    An exception of Canary's own never reaches the scheduler: the workers learn that blocks can't be followed any more.
    Lists of answers go the same way (`AnswerLists`).
    """

    def __init__(self, scheduler: Any, sweep_interval: int = 0) -> None:
        self._sweep_interval = sweep_interval
        self._manager, self._requests = scheduler.kv_cache_manager, scheduler.requests
        self._message = BlockMessage(0)
        drafted = int(getattr(scheduler, "num_spec_tokens", 0) or 0)
        self._answers = AnswerLists(lambda: scheduler.running, lambda: scheduler.requests, drafted)
        self._request: str | None = None
        self._fresh: set[int] = set()
        self.told: list[Callable[[Any], None]] = []
        """Called with each output of the scheduler."""
        self._guard = functools.partial(Sheltered, self.broke)
        self._patches = Patches(self._guard)
        pool = self._manager.block_pool
        follow = self._patches.follow
        follow(pool, "get_new_blocks", lambda blocks, *_, **__: self._note("alloc", blocks))
        follow(pool, "touch", self._touched)
        follow(pool, "cache_full_blocks", self._cached)
        follow(pool, "_maybe_evict_cached_block", self._evicted)
        self._patches.wrap(pool, "reset_prefix_cache", self._resets)
        connector = getattr(scheduler, "connector", None)
        if hasattr(connector, "reset_cache") and not hasattr(connector, "_connectors"):
            follow(connector, "reset_cache", self._emptied)
        follow_releases(self._patches, pool, self._guard, self._note)
        for name in ("allocate_slots", "free"):
            self._patches.wrap(self._manager, name, self._named)
        follow(self._manager, "free", self._freed)
        # Of the object: a scheduler of one's own may have another than its class's.
        follow(scheduler, "schedule", lambda output, *_, **__: self.scheduled(output))

    def scheduled(self, output: Any) -> None:
        """The scheduler has made ``output``, which carries the events since the last one."""
        number = self._message.number
        if self._sweep_interval and number and number % self._sweep_interval == 0:
            with self._guard("sweep"):
                self._message.swept = sweep(self._manager)
        for new in output.scheduled_new_reqs:
            request = self._requests.get(new.req_id)
            if salt := getattr(request, "cache_salt", None):
                self._message.salts[new.req_id] = salt
            if traceparent := (getattr(request, "trace_headers", None) or {}).get("traceparent"):
                self._message.traces[new.req_id] = traceparent
        setattr(output, messages.ATTRIBUTE, self._message)
        parts = self._answers.next(output.total_num_scheduled_tokens)
        if parts is not None:
            setattr(output, messages.ANSWERS, parts)
        self._message = BlockMessage(number + 1, broken=self._message.broken)
        self._fresh.clear()
        for told in self.told:
            told(output)

    def close(self) -> None:
        """Restores the pool's functions."""
        self._patches.undo()

    def _freed(self, _: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        if request.is_finished():
            self._answers.ended(request)

    def _note(self, sort: BlockSort, blocks: Iterable[Any]) -> None:
        self._put(sort, [block.block_id for block in blocks if not block.is_null])

    def _put(self, sort: BlockSort, numbers: list[int]) -> None:
        if self._message.broken is None:
            add_event(self._message.events, BlockEvent(sort, self._request, numbers))

    def _touched(self, _: Any, blocks: Any, *args: Any, **kwargs: Any) -> None:
        numbers = [block.block_id for block in blocks if not block.is_null]
        self._put("share", numbers)
        if not self._fresh.isdisjoint(numbers):
            self._put("forget", [number for number in numbers if number in self._fresh])

    def _cached(
        self, _: Any, request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, *args: Any, **kwargs: Any
    ) -> None:
        new = blocks[num_cached_blocks:num_full_blocks]
        self._fresh.update(block.block_id for block in new if not block.is_null)

    def _evicted(self, evicted: bool, block: Any) -> None:
        if evicted and block.ref_cnt == 0:
            self._note("evict", [block])

    def _resets(self, original: Callable[..., bool]) -> Callable[..., bool]:
        pool = self._manager.block_pool

        @functools.wraps(original)
        def reset(*args: Any, **kwargs: Any) -> bool:
            cached = [b for b in pool.blocks if b.block_hash is not None and b.ref_cnt == 0]
            done = original(*args, **kwargs)
            if done:
                with self._guard("after reset_prefix_cache"):
                    self._note("evict", cached)
            return done

        return reset

    def _emptied(self, done: bool | None) -> None:
        pool = self._manager.block_pool
        unused = pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        self._message.emptied |= done is True and unused and not any(block.block_hash for block in pool.blocks)

    def _named(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Attributes actions of ``original`` to its request. Called by vLLM for each request of each step: nothing here
        may cost anything unless a connector brings tokens."""

        @functools.wraps(original)
        def named(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._request = request.request_id
            try:
                result = original(request, *args, **kwargs)
            finally:
                self._request = None
            if len(args) > 4 or kwargs.get("num_external_computed_tokens"):
                with self._guard("after allocate_slots"):
                    self._allocated(result, request, *args, **kwargs)
            return result

        return named

    def _allocated(self, blocks: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        """``args`` after the request: new tokens, computed tokens of the prefix cache, its blocks, lookahead tokens,
        tokens of a connector."""
        brought = kwargs.get("num_external_computed_tokens", args[4] if len(args) > 4 else 0)
        if blocks is None or not brought:
            return
        cached = kwargs.get("num_new_computed_tokens", args[1] if len(args) > 1 else 0)
        first = int(request.num_computed_tokens) + int(cached)
        groups = self._manager.kv_cache_config.kv_cache_groups
        brought_to: list[list[int]] = []
        for number, held in enumerate(self._manager.get_block_ids(request.request_id)):
            size = int(groups[number].kv_cache_spec.block_size)
            brought_to.append([int(b) for b in held[first // size : -(-(first + brought) // size)]])
        tokens = loaded(request, list(request.all_token_ids[: first + brought]))
        # With embeddings in the place of tokens the prefix can't be known.
        known = getattr(request, "prompt_embeds", None) is None
        conditions = adapter_name(request.lora_request), getattr(request, "cache_salt", None)
        self._message.loads.append(BlockLoad(request.request_id, tokens, first, brought_to, known, *conditions))

    def broke(self, where: str, error: Exception) -> None:
        """Blocks can't be followed any more."""
        reason = f"{where}: {error_text(error)}"
        self._message.broken = reason
        emit(Event("lifetime_off", "error", {"reason": reason, "regions": []}))
