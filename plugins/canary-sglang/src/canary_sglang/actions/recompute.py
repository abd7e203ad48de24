"""`SchedulerRecompute`: has SGLang's scheduler compute requests again by internal ones, and compares both."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from canary_adapters import (
    LOST_ADAPTER,
    UNREMEMBERED,
    InternalRequests,
    ParkedPrefix,
    RecomputePair,
    RecomputePairs,
    Recomputes,
    Running,
    is_internal,
    model_rounding,
    recompute_off,
)
from canary_core import Canary, may_recompute
from canary_sglang.actions.agreement import Agreement
from canary_sglang.actions.compared import NO_STATES, ComparedRegions
from canary_sglang.actions.held_messages import HeldMessages
from canary_sglang.actions.own_requests import OwnRequests
from canary_sglang.actions.parked import RadixPrefix, RadixPrefixes
from canary_sglang.actions.ranks import Ranks
from canary_sglang.actions.touches import Touches, running
from canary_sglang.compat import attended, caches, runners, schedulers
from canary_sglang.transfer.storage import others_store

SPARE = 2
"""An internal request must leave as many tokens free as it takes, and so many pages for each running request."""

NOT_FROM_THE_START = f"of several ranks {UNREMEMBERED}"
NOT_ALIKE = "not all ranks have requests computed again in the same way, or some are unguarded: they can't do it alike"
OTHERS_STORE = "others may store in {name}, and round otherwise, unless CANARY_LEDGER_PRIVATE names it"
OFF = "Canary was switched off on rank {rank}"


class SchedulerRecompute(InternalRequests):
    """The recomputes of one scheduler, in the scheduler's process. Nothing happens before the first call of `ask` of
    `pairs`, unless ``CANARY_RECOMPUTE`` is a share.

    With a share, or with ``CANARY_CONTROL=write``, prefixes left by ended requests in the prefix cache are remembered,
    too. With a share an idle scheduler computes them again.

    Over ranks each one calls all methods at the same places of its loop, has the same internal requests, and compares
    its own shard. Its decisions follow from requests, slots and an `Agreement`. So the end of one rank's Canary ends
    nothing before all ranks know.

    `turn` belongs before the making of a batch, `made` around the run of a batch, `idle` in a turn without a batch.
    ``runner``: the `ModelRunner` of the served model. ``paged``: regions numbered by the engine's slot table.

    together: whether all ranks do this alike; asked once, before the first exchange, where there are several.
    """

    def __init__(self, canary: Canary, runner: Any, paged: Sequence[str]) -> None:
        self._canary = canary
        self.together: Callable[[], bool] = lambda: False
        self._agreement: Agreement | None = None
        self._off: str | None = None
        self._failed: str | None = None
        self._table: Tensor = runner.req_to_token_pool.req_to_token
        self._runner, self._compared = runner, ComparedRegions(canary, runner, paged)
        model = runner.model_config
        rounding = partial(model_rounding, model.dtype, model.hf_text_config)
        calls = attended.calls(runner, self._compared.regions)
        self.pairs = RecomputePairs(
            canary, self._compared.groups, rounding, lambda: [one.rid for one in self._users()], calls
        )
        self._touched = Touches(self._request)
        self._recomputes = Recomputes(self, self._touched, canary.config.recompute, self._clock)
        self._active = bool(canary.config.recompute)
        self.parked = UNREMEMBERED
        self._remembers = may_recompute(canary.config)
        self._prefixes: RadixPrefixes | None = None
        self._cache: Any = None
        self._messages: HeldMessages | None = None
        self._scheduler: Any = None
        self._batch: Any = None
        self._target: Any = None
        self._own = OwnRequests()
        self._making = False
        self._told = False

    @property
    def linked(self) -> bool:
        """Whether other ranks wait for this one at each turn, also after `close`."""
        return self._agreement is not None and self._agreement.ranks.size > 1

    def turn(self, scheduler: Any) -> None:
        """The scheduler is about to make a batch. Raises only if the process group fails."""
        self._scheduler = scheduler
        if self._remembers and self._agreement is None:
            self._meet(scheduler)
        if self._remembers and scheduler.tree_cache is not self._cache:
            self._remember(scheduler)
        if self._active or self._prefixes is not None:
            self.pairs.count(self._recomputes.counted())
        wanted = self.pairs.wanted()
        if not (wanted or self._active or self._remembers or self.linked):
            return
        agreement = self._agreement or self._meet(scheduler)
        end = self._failed if self._canary.enabled else OFF.format(rank=self._canary.config.rank)
        wanted, ends = agreement.turn(wanted, end)
        if ends:
            self._end(ends[0])
        elif wanted or self._active:
            self._take_turn(wanted, agreement)

    def _meet(self, scheduler: Any) -> Agreement:
        """Before anything is done: several ranks find out whether all take part."""
        ranks = Ranks(None)
        with self._recomputes.sheltered():
            # What can't be done is the same on all ranks.
            ranks = Ranks(None if self._refusal() is not None else schedulers.deciding_group(scheduler)[0])
        if ranks.size > 1:
            if not self._remembers:
                self._off = NOT_FROM_THE_START
            elif not self.together():
                self._off = NOT_ALIKE
            if self._off is not None:
                # Whoever asks here is told, and nobody waits for other ranks.
                ranks, self._remembers, self.parked = Ranks(None), False, self._off
        self._agreement = Agreement(ranks)
        with self._recomputes.sheltered():
            self.longest = schedulers.longest_lesson(scheduler)
        return self._agreement

    def _take_turn(self, wanted: Sequence[str], agreement: Agreement) -> None:
        self._active = True
        for request in wanted:
            self._recomputes.want(request)
        with self._recomputes.sheltered():
            self._own.drop(self._scheduler)
            self._look_at_settings()
            self._batch = None
            if self._own.lesson is not None and (self._nearly_full() or not (self._users() or self._others_wait())):
                self._recomputes.end_lesson()
            if self._messages is None and self._prefixes is not None:
                self._messages = HeldMessages(self._scheduler, self._leave)
            self._recomputes.before()
            if self._prefixes is not None and agreement.idles() and schedulers.is_idle(self._scheduler):
                self._recomputes.idle()
            self._own.go_on(self._scheduler, self._table)

    def _end(self, reason: str) -> None:
        """The same turn on all ranks: one of them, or the only one, can't go on."""
        self._agreement, self._off = Agreement(Ranks(None)), reason
        with self._recomputes.sheltered():
            self._own.drop(self._scheduler)
            self._recomputes.give_way()
            self._own.go_on(self._scheduler, self._table)
            self._own.again = None
            self._recomputes.stop(reason)
            self._remembers, self.parked = False, reason
            self._forget()
        if not self._canary.enabled:
            self.close()
        elif self._canary.config.recompute:
            self._canary.tell(recompute_off(reason))

    @contextlib.contextmanager
    def made(self, scheduler: Any, batch: Any) -> Iterator[None]:
        """Context of a run of ``batch``; afterwards an internal request completed by the run is compared."""
        if not self._active or self._scheduler is not scheduler:
            yield
            return
        pairs: Sequence[RecomputePair] = ()
        watched: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        self._making = True
        with self._recomputes.sheltered():
            self._batch = batch
            pairs = self._recomputes.after(schedulers.computed_tokens(scheduler, batch))
            self._own.leave_queue(scheduler)
            watched = self._attended(batch)
        with watched:
            yield
        self._making = False
        self._compare(pairs)

    def idle(self, scheduler: Any) -> None:
        """A turn without a batch."""
        if self._active and self._scheduler is scheduler:
            pairs: Sequence[RecomputePair] = ()
            with self._recomputes.sheltered():
                self._batch = None
                pairs = self._recomputes.after(0)
                self._own.leave_queue(scheduler)
            self._compare(pairs)

    def close(self) -> None:
        """Ends the present internal request; over ranks in a later `turn`. Open calls of `ask` fail."""
        if self.linked:
            self.pairs.close()
            return
        with self._recomputes.sheltered():
            if self._scheduler is not None:
                self._own.drop(self._scheduler)
            self._recomputes.close()
            self._own.close()
        self._active = False
        self._forget()
        self.pairs.close()

    def running(self) -> Sequence[Running]:
        """See `InternalRequests`."""
        return [running(one) for one in self._users() if one.output_ids and self._again(one) is None]

    def find(self, name: str) -> Running | None:
        """See `InternalRequests`. Of several requests with one name any."""
        prefix = self.prefix(name)
        if prefix is not None:
            return Running(name, prefix.left(), 0, prefix.number)
        request = self._request(name)
        return None if request is None else running(request)

    def room(self, request: str) -> bool:
        """Free slots, with those of the prefix cache as for any other request, a row of the table, and an empty
        queue."""
        if self._refusal() is not None:
            # Answered at once: see `begin`.
            return True
        scheduler, target = self._scheduler, self._in_turn(request)
        if target is None:
            return False
        cache, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
        free = caches.free_tokens(cache, allocator)
        tokens = target.tokens + int(scheduler.page_size)
        rows = scheduler.req_to_token_pool.available_size()
        return rows > 1 and SPARE * tokens + self._spare() <= free and caches.states_fit(cache, evicts=True)

    def _spare(self) -> int:
        """Tokens that running requests may take in their next forwards."""
        return SPARE * int(self._scheduler.page_size) * len(self._scheduler.running_batch.reqs)

    def _nearly_full(self) -> bool:
        """Whether SGLang may soon retract a request, and perhaps that of a user before a lesson."""
        scheduler = self._scheduler
        return caches.free_tokens(scheduler.tree_cache, scheduler.token_to_kv_pool_allocator) < self._spare()

    def hindered(self, prefix: ParkedPrefix) -> str | None:
        """See `InternalRequests`."""
        adapter = prefix.lora_id if isinstance(prefix, RadixPrefix) else None
        return None if adapter is None or adapter in runners.adapters(self._runner) else LOST_ADAPTER

    def spare(self, request: str) -> bool:
        """See `InternalRequests`. With so many free slots, and states, SGLang itself evicts nothing."""
        scheduler, target, prefix = self._scheduler, self._in_turn(request), self.prefix(request)
        if target is None or self._prefixes is None or not isinstance(prefix, RadixPrefix):
            return False
        needed = target.tokens + SPARE * int(scheduler.page_size)
        return caches.states_fit(scheduler.tree_cache, evicts=False) and self._prefixes.make_room(prefix, needed)

    def _in_turn(self, request: str) -> Running | None:
        """The target, where nobody else waits or is between two chunks."""
        busy = self._others_wait() or self._scheduler.chunked_req is not None
        return None if busy else self.find(request)

    def begin(self, name: str, request: str, tokens: int, new_tokens: int = 1) -> str | None:
        """See `InternalRequests`."""
        target: Any = self.prefix(request)
        why = self._refusal()
        if target is None:
            target = self._request(request)
            why = why or self._again(target)
        if why is None:
            made = schedulers.internal_request(self._scheduler, name, target, tokens, new_tokens)
            if new_tokens > 1:
                self._own.hide(self._scheduler)
                self._own.lesson = made
            else:
                self._target, self._own.again = target, made
            self._scheduler.waiting_queue.append(made)
        return why

    def computed(self, name: str) -> int | None:
        """See `InternalRequests`."""
        request = self._own.named(name)
        return None if request is None else self._own.computed(request, self._batch)

    def crowded(self, name: str) -> bool:
        """Also after a turn in the queue. A lesson that decodes is not in the way of another request's chunks."""
        request = self._own.named(name)
        queued = any(one is request for one in self._scheduler.waiting_queue)
        return queued or self._others_wait(chunks=request is not self._own.lesson)

    def blocks(self, name: str) -> Sequence[Tensor]:
        """The slots of a request by position, in the place of blocks: those of each region that is compared, -1 where a
        window has passed; and that of the states. As they are now: the row, and the map of windows, have another
        request's soon."""
        prefix = self.prefix(name)
        if isinstance(prefix, RadixPrefix):
            return prefix.blocks()
        again = self._own.again
        internal = again is not None and again.rid == name
        request = again if internal else self._request(name)
        tokens = len(request.origin_input_ids) + len(request.output_ids)
        together = not internal or self._side_by_side(request)
        states = self._compared.states(self._scheduler, request) if together else NO_STATES
        return self._compared.slots(self._table[schedulers.row_number(request), :tokens], states)

    def _side_by_side(self, internal: Any) -> bool:
        """Whether the target's states are those behind the last token that an internal request has computed."""
        target, tokens = self._target, len(internal.origin_input_ids)
        if isinstance(target, RadixPrefix):
            return target.left() == tokens
        return target is not None and schedulers.computed_length(target) == tokens

    def end(self, name: str) -> None:
        """Out of the queue, or between two forwards."""
        request = self._own.named(name)
        if request is not None:
            self.pairs.attention.forget(name)
            self._own.leave_queue(self._scheduler)
            self._own.end(request)
            if not self._making:
                self._own.drop(self._scheduler)

    def _attended(self, batch: Any) -> contextlib.AbstractContextManager[None]:
        """Around the run of ``batch``: one layer's attention to an internal request is kept."""
        internal = self._own.again if self._canary.enabled else None
        if internal is None or not batch.forward_mode.is_extend() or all(one is not internal for one in batch.reqs):
            return contextlib.nullcontext()
        # Requests of users may have one name.
        names = [internal.rid if one is internal else str(row) for row, one in enumerate(batch.reqs)]
        begun = [internal.rid] if not batch.prefix_lens[names.index(internal.rid)] else []
        counts = dict(zip(names, batch.extend_lens, strict=True))
        return self.pairs.attention.forward(begun, counts, lambda: names)

    def _compare(self, pairs: Sequence[RecomputePair]) -> None:
        if not self._canary.enabled:
            return
        with self._canary.guard("recompute"), torch.inference_mode():
            if pairs:
                with schedulers.forward_stream(self._scheduler):
                    self.pairs.compare(pairs)
            self.pairs.read()

    def _users(self) -> list[Any]:
        scheduler = self._scheduler
        return [one for one in schedulers.running_requests(scheduler, self._batch) if not is_internal(one.rid)]

    def _request(self, name: str) -> Any:
        """The present target before others of the same name; None for no running request. The lesson counts as one."""
        lesson = self._own.lesson
        if lesson is not None and lesson.rid == name:
            return None if lesson.finished() else lesson
        found = [one for one in self._users() if one.rid == name]
        return next((one for one in found if one is self._target), found[-1] if found else None)

    def _others_wait(self, chunks: bool = True) -> bool:
        """``chunks``: or one is between two chunks."""
        scheduler = self._scheduler
        grammars = getattr(scheduler, "grammar_manager", None)
        chunked = scheduler.chunked_req
        return (
            any(not is_internal(one.rid) for one in scheduler.waiting_queue)
            or (chunks and chunked is not None and not is_internal(chunked.rid))
            or (self._messages is not None and bool(self._messages.held))
            or (grammars is not None and bool(grammars.has_waiting_grammars()))
        )

    def _leave(self) -> bool:
        """Ends the present internal requests. Returns whether the scheduler is done with them, or serves others
        beside."""
        own, scheduler = self._own.all, self._scheduler
        with self._recomputes.sheltered():
            if own and not self._users():
                self._own.drop(scheduler)
                self._recomputes.give_way()
                return all(schedulers.is_done_with(scheduler, one) for one in own)
        return True

    def _remember(self, scheduler: Any) -> None:
        """Begins to remember the prefixes in the scheduler's cache, or tells the reason for not doing so."""
        self._forget()
        self._cache = cache = scheduler.tree_cache
        with self._recomputes.sheltered():
            refusal = self._refusal() or caches.lookup_refusal(cache)
            if refusal is not None:
                self.parked = refusal
                return
            tokens = int(scheduler.token_to_kv_pool_allocator.size)
            self._prefixes = RadixPrefixes(cache, tokens, self._compared.slots, self._recomputes.sheltered)
            self.parked = self._prefixes.known

    def _forget(self) -> None:
        prefixes, messages = self._prefixes, self._messages
        self._prefixes = self._messages = None
        if prefixes is not None:
            prefixes.close()
        if messages is not None:
            messages.close()

    def _again(self, request: Any) -> str | None:
        return schedulers.again_refusal(request, self._runner.model)

    def _refusal(self) -> str | None:
        others = others_store(self._scheduler.tree_cache, self._canary.config.ledger_private)
        foreign = others and OTHERS_STORE.format(name=others)
        return self._off or self._compared.refusal or schedulers.recompute_refusal(self._scheduler) or foreign

    def _clock(self) -> float:
        return 0.0 if self._agreement is None else self._agreement.clock()

    def _look_at_settings(self) -> None:
        """Says once why ``CANARY_RECOMPUTE`` has no effect here."""
        setting = self._canary.config.recompute
        if self._told or not setting:
            return
        self._told = True
        reason = self._refusal()
        if reason is not None:
            self._recomputes.stop(reason)
            self._canary.tell(recompute_off(reason))

    def failed(self) -> None:
        """See `InternalRequests`."""
        self._active = self._remembers = False
        self._failed = str(self.parked)
        self._forget()
        self.pairs.close()
        if self._scheduler is not None:
            self._own.leave_queue(self._scheduler)
