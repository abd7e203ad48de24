"""A running SGLang that is injured from outside, for diagnoses; see `support.injuries`."""

from array import array
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from support.injuries import ALICE, BOB, PROMPT, Outcome, Patient, hurt
from torch import Tensor

from canary_core import Canary, plugins, testing

RUN = 8
"""Positions of the table that count as one entry: SGLang's has one for each token."""


class SGLangPatient(Patient):
    """Two requests on an engine that others use before and after."""

    halves, page = ("k", "v"), 1

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._pool = engine.runner.token_to_kv_pool
        self.layers = len(self._pool.k_buffer)
        self._undo: list[Callable[[], None]] = []
        self._requests: dict[str, Any] = {}
        for number, name in enumerate((ALICE, BOB)):
            # Others than before: a store that is lost shows only where it would have changed something.
            salt = 29 * len(engine.requests) + 5 * number
            tokens = [(11 * i + salt) % 120 + 3 for i in range(PROMPT + number)]
            self._requests[name] = engine.submit(tokens, 60, f"{name}-{len(engine.requests)}")
        while min(len(request.output_ids) for request in self._requests.values()) < 4:
            engine.step()

    @property
    def canary(self) -> Canary:
        canary: Canary = self._engine.session.canary
        return canary

    def _row(self, request: str) -> Tensor:
        from canary_sglang.compat.schedulers import table_row

        row, _ = table_row(self._scheduler, self._requests[request])
        assert row is not None
        return row

    def cell(self, layer: int, half: str, request: str, position: int) -> Tensor:
        slot = int(self._row(request)[position])
        return getattr(self._pool, f"{half}_buffer")[layer][slot].view(torch.uint8).view(-1)

    def cached(self, request: str) -> int:
        about = self._requests[request]
        return len(about.origin_input_ids) + len(about.output_ids) - 1

    def step(self) -> None:
        self._engine.step()

    def exchange_entries(self, one: tuple[str, int], other: tuple[str, int], both: bool) -> None:
        (a, i), (b, j) = one, other
        first, second = self._row(a)[i * RUN : (i + 1) * RUN], self._row(b)[j * RUN : (j + 1) * RUN]
        kept, others = first.clone(), second.clone()
        first.copy_(others)
        self._undo.append(lambda: first.copy_(kept))
        if both:
            second.copy_(kept)
            self._undo.append(lambda: second.copy_(others))

    def lose_writes(self, layers: Sequence[int]) -> None:
        pool, calls = self._pool, []

        def store(layer: Any, *args: Any, **kwargs: Any) -> None:
            calls.append(layer.layer_id)
            if len(calls) == self.layers:
                del pool.set_kv_buffer
            if layer.layer_id not in layers:
                type(pool).set_kv_buffer(pool, layer, *args, **kwargs)

        pool.set_kv_buffer = store

    def do(self, what: str) -> None:
        getattr(self, f"_{what}")()

    @property
    def _allocator(self) -> Any:
        return self._scheduler.token_to_kv_pool_allocator

    def _release_running(self) -> None:
        self._allocator.free(self._row(ALICE)[PROMPT : PROMPT + 3].to(torch.int64))

    def _release_again(self) -> None:
        slots = self._allocator.alloc(2).clone()
        self._allocator.free(slots)
        self._allocator.free(slots)

    def _hand_out_held(self) -> None:
        """As if the list itself had been overwritten."""
        self._allocator.free_pages[0] = int(self._row(ALICE)[PROMPT])
        self._allocator.alloc(1)

    def _in_next_decode(self, change: Callable[[Any, int, int], None]) -> None:
        """``change`` is given the batch of the next decode, and both requests' places in it."""
        scheduler = self._scheduler

        def run(batch: Any) -> Any:
            alice, bob = (self._requests[name] for name in (ALICE, BOB))
            if batch.forward_mode.is_decode() and alice in batch.reqs and bob in batch.reqs:
                del scheduler.run_batch
                change(batch, batch.reqs.index(alice), batch.reqs.index(bob))
            return type(scheduler).run_batch(scheduler, batch)

        scheduler.run_batch = run

    def _misplace_write(self) -> None:
        def change(batch: Any, alice: int, bob: int) -> None:
            batch.out_cache_loc = batch.out_cache_loc.clone()
            batch.out_cache_loc[alice] = int(self._allocator.free_pages[-1])

        self._in_next_decode(change)

    def _two_writers(self) -> None:
        def change(batch: Any, alice: int, bob: int) -> None:
            batch.out_cache_loc = batch.out_cache_loc.clone()
            batch.out_cache_loc[alice] = batch.out_cache_loc[bob]

        self._in_next_decode(change)

    def _exchange_inputs(self) -> None:
        """By the core's own fault: where the engine makes the input of a decode differs between its releases."""
        injector = testing.FaultInjector.parse(f"next_token_swap:warmup={self.canary.forwards}", seed=1)
        plugins.hook_manager().register(injector)
        for number in (3, 5):
            self._engine.submit([(number * i) % 100 + 130 for i in range(20)], 4)

    def _null_entry(self) -> None:
        row = self._row(ALICE)
        kept = int(row[9])
        row[9] = 0
        self._undo.append(lambda: row[9].fill_(kept))

    def _hit(self, answer: Callable[[Any, Any, Sequence[int]], Any]) -> None:
        """Serves two prompts to their end and one of them again. What the prefix cache matches then is what ``answer``
        makes of its parameters, its own function, and the other prompt."""
        prompts = [[(number * i) % 100 + 130 for i in range(30)] for number in (7, 11)]
        for number, tokens in enumerate(prompts):
            request = self._engine.submit(tokens, 2, f"carol-{number}")
            while not request.finished():
                self._engine.step()
            self._engine.step()
        cache = self._scheduler.tree_cache

        def match(params: Any, *args: Any, **kwargs: Any) -> Any:
            if list(params.key.token_ids[:8]) != prompts[0][:8]:
                return type(cache).match_prefix(cache, params, *args, **kwargs)
            return answer(params, lambda asked: type(cache).match_prefix(cache, asked), prompts[1])

        cache.match_prefix = match
        self._engine.submit(prompts[0], 4, "eve")

    def _foreign_prefix(self) -> None:
        """The cache gives another prompt's prefix, as with a collision of hashes."""

        def answer(params: Any, match: Callable[[Any], Any], other: Sequence[int]) -> Any:
            key = copy(params.key)
            key.token_ids = array("q", other)[: len(params.key.token_ids)]
            return match(replace(params, key=key))

        self._hit(answer)

    def _publish_early(self) -> None:
        """The cache gives slots that were handed out and never written."""

        def answer(params: Any, match: Callable[[Any], Any], other: Sequence[int]) -> Any:
            found = match(params)
            return found._replace(device_indices=self._allocator.alloc(len(found.device_indices)))

        self._hit(answer)

    def close(self) -> None:
        """Undoes what would make the engine fail, and empties it."""
        for undo in reversed(self._undo):
            undo()
        for request in list(self._engine.requests):
            if not request.finished():
                self._engine.abort(request.rid)
        for _ in range(8):
            if not self._scheduler.running_batch.reqs:
                break
            self._engine.step()
        self._engine.scheduler.flush_cache()


CANNOT = {
    "a whole page": "its pages have one slot",
    "half of a page": "its pages have one slot",
    "the edge of each page": "its pages have one slot",
    "evicted in use": "its prefix cache, from 0.5.18 on, is not followed yet: what it keeps is not known",
}
"""Injuries that this engine has no place for, as it is set up here."""


def injure(engine: Any, name: str, seed: int, last: bool = False) -> Outcome:
    """Serves two requests, does the injury of this name, and gives what was told of it. Ends with an empty engine, or,
    where it is the ``last`` one, with one that is of no use."""
    patient = SGLangPatient(engine)
    told = hurt(patient, name, seed)
    if not last:
        patient.close()
    return told
