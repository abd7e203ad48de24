"""`Loads`: informs the ledger of a connector's stores and loads."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from canary_adapters import BlockLoad, BlockMessage, upload
from canary_core import Arrival, Canary, Origin, Patches
from canary_vllm.arrivals.held import Held, computed_before
from canary_vllm.batches.requests import Requests
from canary_vllm.compat import connectors
from canary_vllm.pools.pool import Group


class Loads:
    """For one runner whose engine has a connector, of any kind.

    The scheduler names the blocks a connector will fill, and the tokens (`BlockMessage.loads`). If the request is
    computed in the same step, the connector loads while the forward runs: the blocks are expected before, and have
    arrived when the runner asks the connector for errors. Otherwise the request waits for the load, and is computed in
    a later step: the blocks are expected now, and have arrived before its forward. Of the last block only the slots of
    tokens that were brought are concerned. ``groups``: all guarded ones; what comes for drafts and states is unknown.

    Complete blocks of each forward count as stored: any store of a connector, at any time, is among them.
    """

    def __init__(
        self, canary: Canary, groups: Sequence[Group], requests: Requests, origin: Origin, drafted: int
    ) -> None:
        self._canary = canary
        self._groups = [group for group in groups if group.holds == "tokens"]
        self._others = [group for group in groups if group.holds != "tokens"]
        self._requests = requests
        self._origin = origin
        # With asynchronous scheduling the host learns a step late which of them were accepted.
        self._held = Held(requests.blocks, 2 * drafted + 1 if drafted else 0)
        self._waiting: dict[str, list[tuple[BlockLoad, list[Arrival]]]] = {}
        self._landing: list[tuple[Arrival, frozenset[int]]] = []
        self._patches = Patches(canary.guard)

    def scheduled(self, output: Any, message: BlockMessage | None) -> None:
        """Before the forward of ``output``, after the events of ``message`` were told."""
        if not self._patches.done:
            connector = connectors.instance()
            if connector is not None:
                self._patches.follow(connector, "get_block_ids_with_load_errors", self._loaded)
        self._held.notice(output)
        for name in output.finished_req_ids:
            for _, arrivals in self._waiting.pop(name, ()):
                self._give_up(arrivals)
        now: dict[str, list[BlockLoad]] = {}
        for load in message.loads if message is not None else ():
            now.setdefault(load.request, []).append(load)
            self._forget(load)
        for name, computed in computed_before(output):
            for load, arrivals in self._waiting.pop(name, ()):
                if computed < len(load.tokens):
                    self._give_up(arrivals)
                    arrivals = [arrival for arrival, _ in self._arrivals(load, computed)]
                for arrival in arrivals:
                    self._canary.ledger.arrive(arrival)
            for load in now.pop(name, ()):
                for arrival, blocks in self._arrivals(load, computed):
                    self._canary.ledger.expect(arrival)
                    self._landing.append((arrival, blocks))
        for load in (load for loads in now.values() for load in loads):
            arrivals = [arrival for arrival, _ in self._arrivals(load, len(load.tokens))]
            for arrival in arrivals:
                self._canary.ledger.expect(arrival)
            self._waiting.setdefault(load.request, []).append((load, arrivals))

    def computed(self, output: Any) -> None:
        """After the forward of ``output``: complete blocks may be stored from now on."""
        with self._canary.guard("stored"):
            found: list[list[int]] = [[] for _ in self._groups]
            for name, first, end in self._held.computed(output):
                for group, blocks in zip(self._groups, found, strict=True):
                    size = group.block
                    if end // size > first // size:
                        blocks += self._held.blocks(name, group.number, first // size, end // size)
            for group, blocks in zip(self._groups, found, strict=True):
                if blocks:
                    self._canary.ledger.keep_pages(group.region, upload(blocks, self._canary.device), group.block)

    def close(self) -> None:
        """Restores the connector's functions."""
        self._patches.undo()

    def _loaded(self, failed: Any, *_: Any, **__: Any) -> None:
        """The connector has finished the loads of the last output, except for the blocks ``failed``."""
        landing, self._landing = self._landing, []
        if not landing:
            return
        # What vLLM makes are inference tensors, which can be written to only in this mode.
        with torch.inference_mode():
            for arrival, blocks in landing:
                if blocks & set(failed or ()):
                    self._canary.ledger.give_up(arrival)
                else:
                    self._canary.ledger.arrive(arrival)
            # The next load may write to blocks that were given back meanwhile.
            self._canary.slots.settle()

    def _forget(self, load: BlockLoad) -> None:
        for group in self._others if load.known else [*self._groups, *self._others]:
            if group.holds == "states":
                slots = upload([block for block in load.blocks[group.number] if block], self._canary.device)
            else:
                slots, _ = load.slots(group, self._canary.device)
            self._canary.slots.forget(group.region, slots)

    def _give_up(self, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            self._canary.ledger.give_up(arrival)

    def _arrivals(self, load: BlockLoad, computed: int) -> Iterator[tuple[Arrival, frozenset[int]]]:
        for group in self._groups:
            found = load.arrival(group, computed, self._origin, self._requests.writers, self._canary.device)
            if found is not None:
                yield found
