"""`BlockLoads`: KV loaded by a connector in blocks, against the ledger, and the blocks unfit to be served."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import RLock

from canary_adapters.block_events import BlockGroup, block_slots
from canary_adapters.block_replay import BlockLoad
from canary_adapters.issued import Issued
from canary_adapters.verdict_pipe import BlockVerdict
from canary_core import Arrival, Canary, Origin, Writers
from canary_core.ops.upload import upload

LoadedBlocks = tuple[Arrival, frozenset[int]]
"""An arrival and the numbers of its blocks."""

MOST_LANDED = 8
"""Steps whose loads may wait for a verdict."""


class BlockLoads:
    """Loads of one connector, ``origin``, for ``groups`` with the KV of tokens.

    A request computed in the same step is loaded for while the forward runs: the blocks are expected before, and have
    arrived when the engine asks the connector for errors. Another request waits for the load, and is computed in a
    later step: the blocks are expected now, and have arrived before the forward. Of the last block only the slots of
    brought tokens are concerned.

    With ``CANARY_ON_VIOLATION=protect`` loads are gated: judged before a token computed from the blocks is served.
    Loads for several groups of the engine are not told as failed, since a number of a block doesn't name the group:
    those who act on findings get the verdict, at the same place.

    | load                    | judged                   | without a verdict on the host yet, as on a GPU            |
    |-------------------------|--------------------------|-----------------------------------------------------------|
    | while the forward runs  | right after the forward  | `late` asks again, and returns a wait for the verdict; a  |
    |                         |                          | verdict then goes to the plugins acting on findings       |
    | in the steps before     | at the end of the load   | the end is told a step later, with the verdict            |

    Nothing else waits for the device. ``writers``: of the requests. ``lock``: held by the engine's thread while
    a step is issued, since the wait of `late` may be called in another one.
    """

    def __init__(self, canary: Canary, groups: Sequence[BlockGroup], origin: Origin, writers: Writers) -> None:
        self._canary = canary
        self._groups = groups
        self._origin = origin
        self._writers = writers
        self.gated = canary.config.on_violation == "protect"
        self.lock = RLock()
        self._landed: list[tuple[Issued, list[LoadedBlocks]]] = []
        self._waiting: dict[str, list[tuple[BlockLoad, list[LoadedBlocks]]]] = {}
        self._landing: list[LoadedBlocks] = []
        # Requests of which not all was brought, by the connector's own word.
        self._partly: set[str] = set()
        self._finished: set[str] = set()
        self._held: dict[str, list[LoadedBlocks]] = {}
        # Blocks whose verdict goes with the output being made, and those found bad, for this output and the next.
        self._open: set[int] = set()
        self._failed: set[int] = set()
        self._bad: set[int] = set()
        self._condemned: list[int] = []

    def begin(self, ended: Iterable[str], computed: Iterable[tuple[str, int]], loads: Iterable[BlockLoad]) -> None:
        """Before a forward: names of ended requests, requests in the forward with the number of tokens before, and
        loads that begin now."""
        self._open.clear()
        for name in ended:
            for _, came in self._waiting.pop(name, ()):
                self._give_up(came)
        now: dict[str, list[BlockLoad]] = {}
        for load in loads:
            now.setdefault(load.request, []).append(load)
        for name, before in computed:
            for load, came in self._waiting.pop(name, ()):
                if before < len(load.tokens):
                    self._give_up(came)
                    came = self._arrivals(load, before)
                for arrival, _ in came:
                    self._canary.ledger.arrive(arrival)
            for load in now.pop(name, ()):
                came = self._arrivals(load, before)
                self._expect(came)
                if self.gated and len(load.blocks) == 1:
                    self._open.update(block for _, blocks in came for block in blocks)
                self._landing += came
        for load in (load for loads in now.values() for load in loads):
            came = self._arrivals(load, len(load.tokens))
            self._expect(came)
            self._waiting.setdefault(load.request, []).append((load, came))

    def finished(self, names: Iterable[str] | None, failed: Iterable[str] = ()) -> set[str]:
        """By the connector's word the loads of requests ``names`` have ended, of ``failed`` in vain; called before
        `loaded`. Returns the names to be told to the scheduler, including names held back before. `loaded` may take
        names out of the returned set."""
        self._partly.update(failed)
        self._finished = set(names or ())
        if self._held:
            if self._canary.enabled:
                self._canary.ledger.read()
            for name in [name for name, came in self._held.items() if not self._due(came)]:
                del self._held[name]
                self._finished.add(name)
        return self._finished

    def loaded(self, failed: Iterable[int] | None) -> set[int]:
        """The connector has finished the loads of the step, and of the requests named last, except for the blocks
        ``failed``. Returns the blocks to be told to the scheduler as failed, a set joined by verdicts until `late`.
        Needs inference mode if the engine's tensors are made in inference mode."""
        self._failed, failed = set(failed or ()), set(failed or ())
        landing, self._landing = self._landing, []
        for arrival, blocks in landing:
            if blocks & failed:
                self._canary.ledger.give_up(arrival)
            else:
                self._canary.ledger.arrive(arrival)
        if failed:
            every = ((name, blocks) for name, loads in self._waiting.items() for _, c in loads for _, blocks in c)
            self._partly.update(name for name, blocks in every if blocks & failed)
        ended = [name for name in self._finished & self._waiting.keys() if self._may_end(name)]
        for name in ended:
            self._held[name] = [one for _, came in self._waiting.pop(name) for one in came]
            for arrival, _ in self._held[name]:
                self._canary.ledger.arrive(arrival)
        if landing or ended:
            # The next load may write to blocks that were given back meanwhile.
            self._canary.slots.settle()
        if ended or (landing and self.gated):
            self._canary.ledger.send()
            # Nobody takes them where no tokens are sampled.
            self._landed = [*self._landed[-MOST_LANDED:], (Issued(self._canary.device), landing)]
            self._canary.ledger.read()
        for name in ended:
            if self._due(self._held[name]):
                self._finished.discard(name)
            else:
                del self._held[name]
        self._failed |= self._bad
        self._bad.clear()
        self._forget()
        return self._failed

    def late(self) -> Callable[[], None]:
        """The output of the step leaves next, with verdicts that came since on loads beside the forward. Called again
        before the output leaves the process, brings a verdict not there yet, for plugins acting on findings. So does
        the function returned, once, from any thread: waits for the device, where a verdict is still on the way."""
        if self.gated:
            self._canary.ledger.read()
            self._open.clear()
            self._forget()
        landed, self._landed = self._landed, []
        return partial(self._judged, landed)

    def _judged(self, landed: Sequence[tuple[Issued, Sequence[LoadedBlocks]]]) -> None:
        for issued, came in landed:
            if self._due(came):
                issued.wait()
                with self.lock, self._canary.guard("loads judged"):
                    self._canary.ledger.read()

    def takes(self, verdict: BlockVerdict) -> bool:
        """Whether the block of ``verdict`` is told to the scheduler with an output, so that nobody else should act."""
        if verdict.kind != "arrival":
            return False
        if verdict.block in self._open:
            self._failed.add(verdict.block)
        elif any(verdict.block in blocks for came in self._held.values() for _, blocks in came):
            self._bad.add(verdict.block)
        else:
            return False
        self._condemned.append(verdict.block)
        self._canary.count("gated_blocks")
        return True

    @property
    def holding(self) -> bool:
        """Whether a request waits for a verdict, so that `finished` must be asked again."""
        return bool(self._held)

    def _may_end(self, name: str) -> bool:
        """Whether all of the waiting request's load is there, and is gated."""
        whole = name not in self._partly
        self._partly.discard(name)
        return whole and self.gated and all(len(load.blocks) == 1 for load, _ in self._waiting[name])

    def _due(self, came: Sequence[LoadedBlocks]) -> bool:
        return any(self._canary.ledger.awaits(arrival) for arrival, _ in came)

    def _forget(self) -> None:
        """Condemned blocks hold other bytes than by the records, so a record proves nothing about the next write."""
        for group in self._groups if self._condemned else ():
            self._canary.slots.forget(group.region, block_slots(group, upload(self._condemned, self._canary.device)))
        self._condemned.clear()

    def _expect(self, came: Sequence[LoadedBlocks]) -> None:
        for arrival, _ in came:
            self._canary.ledger.expect(arrival)

    def _give_up(self, came: Sequence[LoadedBlocks]) -> None:
        for arrival, _ in came:
            self._canary.ledger.give_up(arrival)

    def _arrivals(self, load: BlockLoad, computed: int) -> list[LoadedBlocks]:
        found = (load.arrival(g, computed, self._origin, self._writers, self._canary.device) for g in self._groups)
        return [one for one in found if one is not None]
