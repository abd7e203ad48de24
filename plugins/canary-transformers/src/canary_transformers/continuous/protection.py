"""`Protection`: acts on verdicts in continuous batching, before the engine takes the tokens of a step."""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from canary_adapters import BlockGroup, BlockVerdict, HashChain, Tries, leaked
from canary_core import Canary, Event, Patches, Verdict, Writers, hookimpl
from canary_transformers.continuous import compat
from canary_transformers.continuous.compat import KVGroup
from canary_transformers.errors import WithheldError

HASH_BYTES = 8
"""Of the engine's hash of a block."""


class Protection:
    """Receives the verdicts of one `ContinuousBatchProcessor`'s cache. Before the engine takes the tokens of a step,
    the requests concerned lose theirs (`Tries`; what ends has `WithheldError` as its error).

    Tokens are given out one by one to streaming requests only: another one, with tokens that may be wrong, begins again
    with its prompt. ``canary``: of the processor's cache.
    """

    def __init__(self, processor: Any, mode: str, groups: Sequence[KVGroup], canary: Canary) -> None:
        self._processor = processor
        self._mode = mode
        self._canary = canary
        self._tell = canary.tell
        self._groups = [BlockGroup(group.name, group.index, group.block_slots) for group in groups]
        self._names = {name: group.region for name, group in zip(self._allocators, self._groups, strict=True)}
        self._chains = {name: HashChain() for name in self._allocators}
        self._found: list[BlockVerdict] = []
        self._tries = Tries[str](mode, {})

    @hookimpl
    def canary_verdict(self, verdict: Verdict) -> None:
        """Keeps the verdict until the engine takes the step's tokens, or schedules."""
        found = BlockVerdict.of(verdict, self._groups)
        if found is not None:
            self._found.append(found)

    def follow(self, patches: Patches) -> None:
        """Wraps methods of the processor and its parts."""
        patches.wrap(self._processor.inputs_and_outputs, "prepare_batch_update", self._wrap_update)
        patches.wrap(self._processor, "prepare_next_batch", self._wrap_prepare)
        if self._mode == "protect":
            for name, allocator in self._allocators.items():
                patches.follow(allocator, "mark_complete_blocks", partial(self._completed, name, allocator))

    def act(self) -> list[Any]:
        """Acts on the verdicts so far. Returns the states of requests that were taken from the scheduler."""
        found, self._found = self._found, []
        if not found:
            return []
        taken: list[Any] = []
        try:
            self._act(found, taken)
        except Exception as error:
            # In log mode the engine goes on whatever happens.
            self._failed(leaked(error))
        return taken

    @property
    def _allocators(self) -> dict[str, Any]:
        allocators: dict[str, Any] = self._processor.cache.cache_allocators
        return allocators

    def _wrap_update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def prepare_batch_update(*args: Any, **kwargs: Any) -> Any:
            scheduled, tokens, logprobs = original(*args, **kwargs)
            self._canary.step.reader.judge()
            taken = self.act()
            return _without(taken, scheduled, tokens, logprobs) if taken else (scheduled, tokens, logprobs)

        return prepare_batch_update

    def _wrap_prepare(self, original: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(original)
        def prepare_next_batch(*args: Any, **kwargs: Any) -> bool:
            # A verdict between two steps, before the next prefix hit.
            self.act()
            return original(*args, **kwargs)

        return prepare_next_batch

    def _completed(self, name: str, allocator: Any, _: None, request_id: str, *args: Any, **kwargs: Any) -> None:
        """After `mark_complete_blocks`: the last ``new`` hashed blocks of the request are new."""
        new = kwargs.get("new_new_blocks", args[1] if len(args) > 1 else None)
        hashes = []
        for block in allocator.block_table[request_id]:
            known = allocator.ledger.block_to_hash.get(block)
            if known is None:
                break
            hashes.append(_bytes(known))
        self._chains[name].note(hashes, 0 if new is None else max(len(hashes) - new, 0))

    def _act(self, found: Sequence[BlockVerdict], taken: list[Any]) -> None:
        scheduler = self._processor.scheduler
        concerned = []
        for state in scheduler.active_requests.values():
            name, held = Writers.told(state.request_id), self._held(state.request_id)
            own = [v for v in found if v.everything or v.request == name or (v.of_all and (v.region, v.block) in held)]
            if own:
                concerned.append((state, own))
        if self._mode != "abort":
            self._evict(found, concerned)
        for state, own in concerned:
            stands = self._mode == "quarantine" or all(v.stands for v in own)
            again = self._tries.again(state.request_id, stands or not _given_out(state))
            if not (again and self._again(state, stands, own[0], taken)):
                self._end(state, own[0], taken)
        if concerned:
            # It stays set until a request ends, and perhaps none is left to end.
            scheduler.block_new_requests = False
        self._tries.keep(scheduler.active_requests.keys() | scheduler.waiting_requests.keys())

    def _held(self, request: str) -> set[tuple[str, int]]:
        """The request's blocks, by region."""
        allocators = self._allocators.items()
        return {(self._names[name], b) for name, a in allocators for b in a.block_table.get(request, ())}

    def _again(self, state: Any, keeps: bool, why: BlockVerdict, taken: list[Any]) -> bool:
        """Queues the request again, as the engine's own soft reset does; ``keeps``: with the tokens generated so far.
        Returns whether the scheduler took it."""
        try:
            if not keeps:
                _back_to_prompt(state)
            fresh = state.create_equivalent_initial_request()
            self._take(state, taken)
            self._processor.scheduler.add_waiting_request(fresh)
        except Exception as error:
            self._failed(f"{Writers.told(state.request_id)} could not be queued again, and ends: {error!r}")
            return False
        self._tell(Event("recomputed", "warning", _about(why, state)))
        return True

    def _end(self, state: Any, why: BlockVerdict, taken: list[Any]) -> None:
        """Ends the request and its forks to be with an error, and without a token."""
        router, error = self._processor.output_router, WithheldError(why.kind, why.region)
        _back_to_prompt(state)
        # Children of a request that is not forked yet are awaited by the caller, too.
        children = [f"{state.request_id}__child#{number}" for number in range(state.num_children)]
        for ended in (state, *(state.fork(child) for child in children)):
            router.fail_and_deliver(ended, error)
        self._take(state, taken)
        self._tell(Event("aborted", "error", _about(why, state)))

    def _take(self, state: Any, taken: list[Any]) -> None:
        """Takes the request from the scheduler: its blocks go back, those with a hash to the prefix cache."""
        scheduler = self._processor.scheduler
        taken.append(state)
        scheduler._requests_to_fork[:] = [other for other in scheduler._requests_to_fork if other is not state]
        # The engine passes by a state that is FINISHED, where the next batch with it is under way.
        state._status = type(state._status).FINISHED
        scheduler.finish_request(state.request_id)

    def _evict(self, found: Sequence[BlockVerdict], concerned: Sequence[tuple[Any, Sequence[BlockVerdict]]]) -> None:
        hashed = {name: dict(a.ledger.block_to_hash) for name, a in self._allocators.items()}
        wrong = {name: {v.block for v in found if v.region == self._names[name]} for name in hashed}
        everything = any(v.everything for v in found)
        if self._mode == "protect":
            for state, own in concerned:
                for name, allocator in self._allocators.items():
                    wrong[name] |= self._spoiled(name, allocator.block_table.get(state.request_id, ()), own)
            # Each layer computes from the others, in whatever group.
            several = sum(map(bool, hashed.values())) > 1 and any(wrong[name] & hashed[name].keys() for name in hashed)
            everything = everything or several
        gone = 0
        for name, allocator in self._allocators.items():
            blocks = wrong[name] & hashed[name].keys()
            if everything:
                blocks = set(hashed[name])
            elif self._mode == "protect" and blocks:
                hashes = {block: _bytes(known) for block, known in hashed[name].items()}
                blocks = self._chains[name].after(blocks, hashes)
            compat.evict(self._processor.cache, allocator, blocks)
            gone += len(blocks)
        if gone:
            number = len({(v.region, v.block) for v in found if v.block >= 0})
            self._tell(Event("quarantined", "warning", _about(found[0]) | {"blocks": number, "evicted": gone}))

    def _spoiled(self, name: str, table: Sequence[int], own: Sequence[BlockVerdict]) -> set[int]:
        """Blocks of a request's ``table`` computed from what its verdicts say: those from the wrong one on. Without a
        known block all, unless the KV of earlier forwards stands."""
        blocks: set[int] = set()
        for verdict in own:
            if verdict.block >= 0 and verdict.region == self._names[name] and verdict.block in table:
                blocks.update(table[table.index(verdict.block) :])
            elif not verdict.stands or verdict.block >= 0:
                blocks.update(table)
        return blocks

    def _failed(self, reason: str) -> None:
        self._tell(Event("quarantine_failed", "error", {"reason": reason}))


def _without(taken: Sequence[Any], scheduled: Sequence[Any], tokens: Sequence[int], logprobs: Any) -> Any:
    """A batch's requests, tokens and log-probabilities without those of the states ``taken``."""
    gone = {id(state) for state in taken}
    kept = [request for request in scheduled if id(request.state) not in gone]
    sampled = [id(request.state) not in gone for request in scheduled if request.has_new_token]
    tokens = [token for token, stays in zip(tokens, sampled, strict=False) if stays]
    if logprobs is not None:
        logprobs = [logprob for logprob, stays in zip(logprobs, sampled, strict=False) if stays]
    return kept, tokens, logprobs


def _given_out(state: Any) -> bool:
    """Whether the caller may have a token of the answer."""
    before = state._true_initial_tokens
    return bool(state.streaming and (state.generated_tokens or (before and len(state.initial_tokens) > before)))


def _back_to_prompt(state: Any) -> None:
    """Takes all generated tokens from the state, those from before a preemption, too."""
    before = state._true_initial_tokens or len(state.initial_tokens)
    if state.max_new_tokens is not None:
        state.max_new_tokens += len(state.initial_tokens) - before
    state.initial_tokens = state.initial_tokens[:before]
    state.generated_tokens, state.logprobs, state._timestamps = [], [], []


def _bytes(hashed: int) -> bytes:
    return hashed.to_bytes(HASH_BYTES, "little", signed=False)


def _about(verdict: BlockVerdict, state: Any = None) -> dict[str, object]:
    fields: dict[str, object] = {} if state is None else {"request": Writers.told(state.request_id)}
    return fields | verdict.about
