"""`SchedulerRequests`: internal requests of a scheduler like vLLM's, in the scheduler's process."""

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from canary_adapters.block_replay import BlockLoad
from canary_adapters.held_states import RecomputeBegun
from canary_adapters.hidden_requests import HiddenRequests
from canary_adapters.internal_requests import InternalRequests, RecomputePair, Running, is_internal
from canary_adapters.marked_outputs import WANTED
from canary_adapters.parked_blocks import BlockPrefix, room_for_proof
from canary_adapters.parked_prefixes import LOST_ADAPTER, UNREMEMBERED, GroupBlocks, ParkedPrefix, ParkedPrefixes
from canary_adapters.recompute_pairs import RecomputePairs
from canary_adapters.recompute_requests import Recomputes
from canary_adapters.touched_requests import TouchedRequests
from canary_adapters.unfit_requests import unfit_prefix
from canary_core import Patches
from canary_core.config.values import RecomputeShare

PAIRS = "canary_recompute"
"""Attribute of the scheduler's output with a list of `RecomputePair`, pickled along."""

BEGUN = "canary_recompute_begun"
"""The same with a `RecomputeBegun`."""

COUNTED = "canary_counted"
"""Attribute of the scheduler's output with counts for `Canary.stats`, by name."""

POLL_S = 1.0
"""Time between two looks of an idle engine at workers of other processes."""

MOST_OF_FREE = 2
"""An internal request gets no more than one in so many free blocks."""


@dataclass(frozen=True, slots=True)
class IdleWorkers:
    """The workers of an idle engine: ``here``, in the scheduler's process, or in others. call: hands messages to each
    worker of other processes, and returns the requests wanted from each worker."""

    here: Sequence[RecomputePairs]
    call: Callable[[Sequence[RecomputePair]], Iterable[Sequence[str]]]

    def ask(self, wake: Callable[[], None], polls: bool) -> list[str]:
        """Wanted requests; of other processes only with ``polls``."""
        for worker in self.here:
            worker.wake = wake
        asked = [worker.wanted() for worker in self.here] if self.here or not polls else self.call([])
        return [name for names in asked for name in names]

    def tell(self, pairs: Sequence[RecomputePair]) -> None:
        """Hands over messages."""
        for worker in self.here:
            worker.compare(pairs)
        if not self.here:
            self.call(pairs)


class SchedulerRequests(InternalRequests):
    """Has requests of ``scheduler`` computed again, until `close`. Give each output of the scheduler to `note`, and
    each one of a runner to `hear`.

    Wraps ``schedule``, ``update_from_output`` and ``reset_prefix_cache`` of ``scheduler``, and ``cache_blocks`` of the
    manager: from the start with a ``share``, else once somebody asks. Outputs and blocks of internal requests reach
    neither clients nor the prefix cache, nor a connector (`HiddenRequests`); a reset finds none of them.

    ``make``: makes a request of a name, with the first tokens of another request, and so many new ones. ``why_not``:
    why a request can't be computed again, None where it can. ``abort``: ends a request. ``share``: see `Recomputes`.
    """

    def __init__(
        self,
        scheduler: Any,
        make: Callable[[str, Any, int, int], Any],
        why_not: Callable[[Any], str | None],
        abort: Callable[[str], None],
        share: RecomputeShare,
    ) -> None:
        self._scheduler = scheduler
        self._make, self._why_not, self._abort = make, why_not, abort
        self._manager = scheduler.kv_cache_manager
        self._touched = TouchedRequests()
        self._recomputes = Recomputes(self, self._touched, share)
        self.polls = False
        """Whether an idle engine asks workers of other processes for wanted requests."""
        self._patches, self._parks = Patches(), Patches()
        self._hidden = HiddenRequests(scheduler, self._recomputes.sheltered)
        self._begun: RecomputeBegun | None = None
        # Number of answered tokens when a request began with KV that a connector may have failed to bring.
        self._unsure: dict[str, int] = {}
        self._timer: threading.Timer | None = None
        self.here: Callable[[], Sequence[RecomputePairs]] = tuple
        """All workers, where they are in the scheduler's process; else none."""
        groups = self._manager.kv_cache_config.kv_cache_groups
        self._block_sizes = [int(group.kv_cache_spec.block_size) for group in groups]
        self.parked = UNREMEMBERED
        self.longest = int(scheduler.max_model_len)
        if share:
            self._wrap()

    def remember(self) -> None:
        """Wraps ``free`` of the manager, to remember what requests leave in the prefix cache."""
        pool = self._manager.block_pool
        if pool.enable_caching:
            self.parked = ParkedPrefixes.of_cache(int(pool.num_gpu_blocks) * max(self._block_sizes))
            for name in ("free", "pop_blocks_for_free"):
                if hasattr(self._manager, name):
                    self._parks.wrap(self._manager, name, self._frees)
        else:
            self.parked = "the engine has no prefix cache"

    def close(self) -> None:
        """Restores the scheduler, without an internal request."""
        self._stop_timer()
        self._parks.undo()
        self._recomputes.close()
        self._patches.undo()
        self._hidden.close()

    def note(self, output: Any, loads: Sequence[BlockLoad] = ()) -> None:
        """The scheduler has made ``output``: takes in the requests that begin in the middle, or again, and ``loads``
        of a connector. All that must be known before anybody asks."""
        with self._recomputes.sheltered():
            for load in loads:
                self._touched.brought(load.request, load.first)
            self._note(output)

    def hear(self, made: Any) -> None:
        """A runner has made an output, with requests that somebody asks for."""
        wanted = getattr(made, WANTED, ())
        if wanted:
            with self._recomputes.sheltered():
                self._want(wanted)

    def idle(self, workers: "IdleWorkers", wake: Callable[[], None]) -> None:
        """The engine is about to wait: for a request, or for a call of ``wake`` on any thread."""
        with self._recomputes.sheltered():
            self._stop_timer()
            if self._scheduler.pause_state.name != "UNPAUSED":
                return
            self._want(workers.ask(wake, self.polls))
            seconds = self._recomputes.idle() if self._patches.done else None
            missed = self._recomputes.missed()
            if missed:
                # Without a batch nothing takes them along.
                workers.tell(missed)
            poll = POLL_S if self.polls and not workers.here else None
            waits = [one for one in (seconds, poll) if one is not None]
            if waits:
                self._timer = threading.Timer(min(waits), wake)
                self._timer.daemon = True
                self._timer.start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _want(self, wanted: Iterable[str]) -> None:
        for request in wanted:
            self._wrap()
            self._recomputes.want(request)

    def running(self) -> Sequence[Running]:
        """See `InternalRequests`."""
        users = (one for one in self._scheduler.running if not is_internal(one.request_id))
        return [self._running(request) for request in users if self._why_not(request) is None]

    def find(self, name: str) -> Running | None:
        """See `InternalRequests`."""
        prefix = self.prefix(name)
        if prefix is not None:
            return Running(name, prefix.left(), 0, prefix.number)
        request = self._scheduler.requests.get(name)
        return self._running(request) if request is not None and request in self._scheduler.running else None

    def room(self, request: str) -> bool:
        """A seat in the batch, and free blocks: blocks of the prefix cache count as free, as for any other request."""
        blocks, free = sum(map(len, self.blocks(request))), self._manager.block_pool.get_num_free_blocks()
        seat = len(self._scheduler.running) < self._scheduler.max_num_running_reqs
        return seat and not self._scheduler.waiting and blocks * MOST_OF_FREE <= free

    def hindered(self, prefix: ParkedPrefix) -> str | None:
        """See `InternalRequests`. An adapter is loaded in all workers, which are in this process, and not replaced in
        the next batch: a user's request has it there, or there are none."""
        adapter = prefix.lora_request if isinstance(prefix, BlockPrefix) else None
        if adapter is None:
            return None
        here = self.here()
        loaded = bool(here) and all(adapter.lora_int_id in worker.adapters() for worker in here)
        used = [one.lora_request for one in self._scheduler.running if not is_internal(one.request_id)]
        alike = any(one is not None and (one.lora_int_id, one) == (adapter.lora_int_id, adapter) for one in used)
        return None if loaded and (alike or not used) else LOST_ADAPTER

    def spare(self, request: str) -> bool:
        """See `InternalRequests`."""
        return not isinstance(self.parked, str) and room_for_proof(
            self._manager.block_pool, self.blocks(request), self.parked
        )

    def begin(self, name: str, request: str, tokens: int, new_tokens: int = 1) -> str | None:
        """See `InternalRequests`."""
        prefix = self.prefix(request)
        target: Any = self._scheduler.requests[request] if prefix is None else prefix
        why = self._why_not(target) if prefix is None else None
        if why is None:
            self._scheduler.add_request(self._make(name, target, tokens, new_tokens))
            if prefix is None and new_tokens == 1 and target.num_computed_tokens == tokens:
                self._begun = RecomputeBegun(name, self.blocks(request))
        return why

    def computed(self, name: str) -> int | None:
        """See `InternalRequests`."""
        request = self._scheduler.requests.get(name)
        return None if request is None else int(request.num_computed_tokens)

    def crowded(self, name: str) -> bool:
        """Also where it was preempted."""
        request = self._scheduler.requests.get(name)
        preempted = request is not None and bool(request.num_preemptions)
        return preempted or any(not is_internal(one.request_id) for one in self._scheduler.waiting)

    def blocks(self, name: str) -> GroupBlocks:
        """See `InternalRequests`."""
        prefix = self.prefix(name)
        held: GroupBlocks = self._manager.get_block_ids(name) if prefix is None else prefix.blocks()
        return held

    def end(self, name: str) -> None:
        """As an abort of a client."""
        self._abort(name)

    def _wrap(self) -> None:
        if not self._patches.done:
            self._patches.wrap(self._scheduler, "schedule", self._schedules)
            self._patches.wrap(self._scheduler, "update_from_output", self._updates)
            self._patches.wrap(self._scheduler, "reset_prefix_cache", self._resets)
            self._patches.wrap(self._manager.coordinator, "cache_blocks", self._caches)
            self._hidden.wrap()

    def _schedules(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def schedule(*args: Any, **kwargs: Any) -> Any:
            with self._recomputes.sheltered():
                self._recomputes.before()
                live, running = self._recomputes.live, self._scheduler.running
                if live and len(running) > 1:
                    # The last one of the batch is preempted first.
                    running.sort(key=lambda request: request.request_id in live)
            output = original(*args, **kwargs)
            with self._recomputes.sheltered():
                pairs = self._recomputes.after(int(output.total_num_scheduled_tokens))
                if pairs:
                    setattr(output, PAIRS, pairs)
                if self._begun is not None:
                    setattr(output, BEGUN, self._begun)
                    self._begun = None
            return output

        return schedule

    def _updates(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def update(*args: Any, **kwargs: Any) -> Any:
            outputs = original(*args, **kwargs)
            if self._recomputes.live:
                with self._recomputes.sheltered():
                    _without(self._recomputes.live, outputs)
                    if all(map(is_internal, self._scheduler.requests)):
                        self._recomputes.end_lesson()
            return outputs

        return update

    def _resets(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """With a block in use the prefix cache is not reset, and what it keeps would be served under other weights."""

        def reset(*args: Any, **kwargs: Any) -> Any:
            with self._recomputes.sheltered():
                self._recomputes.give_way()
                for name in self._recomputes.live:
                    self.end(name)
            return original(*args, **kwargs)

        return reset

    def _caches(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def cache(request: Any, *args: Any, **kwargs: Any) -> Any:
            return None if request.request_id in self._recomputes.live else original(request, *args, **kwargs)

        return cache

    def _frees(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def free(request: Any, *args: Any, **kwargs: Any) -> Any:
            if request.is_finished() and not is_internal(request.request_id):
                with self._recomputes.sheltered():
                    self._ended(request)
            return original(request, *args, **kwargs)

        return free

    def _ended(self, request: Any) -> None:
        if isinstance(self.parked, str):
            return
        name = request.request_id
        # vLLM puts eight random digits behind the client's name.
        alias = name[:-9] if re.fullmatch("-[0-9a-f]{8}", name[-9:]) else None
        why = self._why_not(request) or unfit_prefix(request)
        prefix = BlockPrefix(
            name=name, alias=alias, why=why, touches=self._touched.of(name), lora_request=request.lora_request,
            prompt=request.num_prompt_tokens,
        )  # fmt: skip
        if why is None:
            held = zip(self._block_sizes, self._manager.get_blocks(name).blocks, strict=True)
            prefix.take(request.all_token_ids[: _running(request).tokens], held)
        self.parked.add(prefix)

    def _note(self, output: Any) -> None:
        counted = self._recomputes.counted()
        if counted:
            setattr(output, COUNTED, counted)
        for name in output.finished_req_ids:
            self._touched.ended(name)
            self._unsure.pop(name, None)
        begun = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        cached = output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            computed = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            begun += [(name, hit) for name, hit in computed if name in cached.resumed_req_ids]
        for name, hit in begun:
            request = self._scheduler.requests.get(name)
            self._touched.began(name, hit, request.num_tokens if request is not None and request.num_preemptions else 0)
            if hit and request is not None and getattr(self._scheduler, "connector", None) is not None:
                self._unsure[name] = request.num_output_tokens

    def _running(self, request: Any) -> Running:
        """Beside a connector tokens of a request with a hit count from the next answered token on: vLLM takes tokens
        back that could not be loaded."""
        known, computed = _running(request), int(request.num_computed_tokens)
        if computed <= request.num_tokens:
            # All of them are known, though one that nothing was computed of yet is on its way. States are of so many.
            known = replace(known, tokens=computed, decoded=max(0, computed - request.num_prompt_tokens))
        answered = self._unsure.get(known.name)
        if answered is None or request.num_output_tokens > answered:
            return known
        return replace(known, tokens=0, decoded=0)


def prepare(output: Any, worker: RecomputePairs) -> None:
    """Before the forward of ``output``: has ``worker`` keep what the forward changes."""
    begun = getattr(output, BEGUN, None)
    if isinstance(begun, RecomputeBegun):
        worker.states.hold(begun)


def deliver(output: Any, worker: RecomputePairs) -> None:
    """After the forward of ``output``: has ``worker`` compare what the scheduler sent along with it. Raises
    `ViolationError` in raise mode."""
    counted, pairs = getattr(output, COUNTED, None), getattr(output, PAIRS, None)
    if counted:
        worker.count(counted)
    if pairs:
        worker.compare([one for one in pairs if isinstance(one, RecomputePair)])
    worker.read()


def _running(request: Any) -> Running:
    tokens = min(request.num_computed_tokens - request.num_output_placeholders, request.num_tokens)
    decoded = max(0, tokens - request.num_prompt_tokens)
    more = bool(request.mm_features) or any(
        getattr(request, name, None) is not None for name in ("lora_request", "prompt_embeds")
    )
    return Running(request.request_id, tokens, decoded, int(request.num_preemptions), more)


def _without(names: set[str], outputs: dict[int, Any]) -> None:
    """Takes outputs of internal requests out of the scheduler's outputs to clients."""
    for one in outputs.values():
        if one.outputs:
            one.outputs = [output for output in one.outputs if output.request_id not in names]
        if one.finished_requests:
            one.finished_requests.difference_update(names)
