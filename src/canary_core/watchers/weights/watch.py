"""`WeightWatch`: compares a model's parameters, some chunks after each forward, with the bytes of before."""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from canary_core.config import ScrubBudget
from canary_core.events import Event, size_text
from canary_core.ops.torch.weights import fingerprint
from canary_core.ops.weights import CHUNK_BYTES, ROOM, WeightTable
from canary_core.runtime.host_copy import HostCopy
from canary_core.runtime.streams import capturing
from canary_core.runtime.workspace import Switch, Workspace
from canary_core.violation import Violation
from canary_core.watchers.weights.change import Change
from canary_core.watchers.weights.judge import MOST_STRETCHES, unsure, violation
from canary_core.watchers.weights.parameters import Parameters, counted

MOST_LOOKED = 64
"""Differing chunks read by the host; more are an update."""

MOST_UNSURE = 8
"""Uncertain changes of a few parameters until these are left out: somebody writes there."""

MOST_WITHOUT = 256
"""Forwards without a parameter to compare until an event says so."""


class HasBudget(Protocol):
    """The part of the scrub's `Pace` used here: weights get as many bytes as slots."""

    budget: ScrubBudget
    busy_s: float

    @property
    def off(self) -> bool:
        """Whether nothing is ever compared."""

    @property
    def forwards(self) -> int:
        """Forwards that share one comparison."""

    def scrub_bytes(self, forwards: int) -> int:
        """Bytes allowed for so many forwards."""


class Left(NamedTuple):
    """Everything known of a model's weights when a watch ends, as in `WeightWatch`."""

    parameters: Parameters
    table: WeightTable
    told: dict[int, int]
    next: int
    rounds: int


_left: "WeakKeyDictionary[nn.Module, Left]" = WeakKeyDictionary()


class WeightWatch:
    """After a forward: the next chunks of the parameters are compared with the fingerprints, in one launch on the side
    stream. Nothing waits; the host reads the numbers of differing chunks some forwards later.

    After a difference all chunks are compared once, and the host reads the bytes of the differing ones. The only
    changed word of a chunk, or few changed chunks of a parameter, are damage. Changes like those of an update are none:
    they count as `unsure`, and the content is taken anew. The same is done, silently, wherever torch knows of a change
    (another object, version counter or address, looked at right before each comparison and again before a finding), and
    after `guard` and `changed`. From then to the parameter's next turn no change is seen.

    Memory of the engine is read in `turn` only, which a sleeping engine does not call, and `guard`.
    """

    def __init__(self, workspace: Workspace, switch: Switch, pace: HasBudget) -> None:
        self._workspace = workspace
        self._switch = switch
        self._pace = pace
        self.report: Callable[[Iterable[Violation]], object] = list
        """Takes findings."""
        self._state = next(iter(workspace.states.values()))
        self._models: list[ref[nn.Module]] = []
        self._parameters = Parameters((), workspace.device)
        self._table: WeightTable | None = None
        self._found: HostCopy | None = None
        self._waiting = self._whole = self._suspicion = self._stale = self._laid_out = False
        self._looked: tuple[HostCopy, list[tuple[int, int]]] | None = None
        self._told: dict[int, int] = {}
        self._next = self._since = self._without = self._step = 0
        self._began_s: float | None = None
        self.period_s: float | None = None
        """Seconds in which forwards ran, of the last whole round over all chunks."""
        self.rounds = 0
        self.compared_chunks = 0
        self.renewed = 0
        """How often a parameter's content was taken anew, since torch or the engine told of a change."""
        self.unsure = 0
        """Untold changes, perhaps damage, perhaps updates."""

    def guard(self, model: nn.Module, resume: bool = False) -> None:
        """From now on the parameters of ``model`` should keep the present bytes; ``resume``: the bytes as of the last
        watch over this model, since closed. Again: the present bytes are right. Between forwards, never captured."""
        if any(known() is model for known in self._models):
            self.changed()
            return
        left = _left.pop(model, None) if resume and not self._models else None
        self._models.append(ref(model))
        # Another Canary of the process may have other settings.
        same = left is not None and left.table.fingerprint_keys == self._state.sources.fingerprint_keys
        if left is None or not same or left.table.fingerprints.device != self._workspace.device:
            self._lay_out()
            return
        self._parameters, self._table, self._told = left.parameters, left.table, left.told
        self._next, self.rounds, self._laid_out = left.next, left.rounds, True
        self._began_s = None

    def changed(self) -> None:
        """The engine has, or may have, updated weights: the content is taken anew from the next forward's end on."""
        self._stale = True

    def turn(self, step: int) -> None:
        """A forward, the ``step``-th, was issued on the current stream. Never captured; waits for the device only where
        parameters have got other memory."""
        if not self._switch.enabled or capturing(self._workspace.device):
            return
        with self._switch.guard("step.end"):
            self._step = step
            if self._stale:
                self._lay_out()
            if self._table is None or self._pace.off:
                self._say_unguarded()
                return
            while self._advance():
                pass
            self._since += 1
            if self._since >= self._pace.forwards and not (self._waiting or self._looked):
                self._since = 0
                self._walk(self._table)
                while self._advance():
                    pass

    def close(self) -> None:
        """The Canary ends. The next one over the same model may go on from here."""
        model = self._models[0]() if len(self._models) == 1 else None
        if model is not None and self._table is not None and not self._stale:
            self._workspace.join()
            _left[model] = Left(self._parameters, self._table, self._told, self._next, self.rounds)
        self._models.clear()
        self._table = None

    def stats(self) -> dict[str, int]:
        """Counts by name, without zeros."""
        told = {
            "weights_compared_chunks": self.compared_chunks,
            "weights_renewed": self.renewed,
            "weights_unsure": self.unsure,
        }
        return {name: number for name, number in told.items() if number}

    def figures(self) -> dict[str, float]:
        """The present state by name, without unknown figures."""
        table = self._table
        told: dict[str, float] = {
            "weights_parameters": self._parameters.parameters if table is not None else 0,
            "weights_bytes": table.guarded_bytes if table is not None else 0,
            "weights_memory_bytes": table.memory_bytes if table is not None else 0,
            "weights_left_out": len(self._left_out()),
            "weights_rounds": self.rounds,
        }
        return told if self.period_s is None else {**told, "weights_period_s": self.period_s}

    @torch.inference_mode(False)
    def _lay_out(self) -> None:
        """Finds all parameters anew; takes the content at once the first time, later turn by turn."""
        first, self._stale = not self._laid_out, False
        self._laid_out = True
        # What is still compared is read from the memory that goes now.
        self._workspace.join()
        before = [(s.range.address, s.range.size_bytes) for s in self._parameters.stretches]
        models = [model for model in (known() for known in self._models) if model is not None]
        parameters = Parameters(models, self._workspace.device)
        self._waiting = self._suspicion = False
        self._looked = None
        self._told.clear()
        if self._table is not None and before == [(s.range.address, s.range.size_bytes) for s in parameters.stretches]:
            for known, now in zip(self._parameters.stretches, parameters.stretches, strict=True):
                now.unsure, now.disturbed, now.left_out = known.unsure, self.rounds, known.left_out
            # The same chunks in the same order; each range reads through its present holder.
            self._table.ranges = tuple(stretch.range for stretch in parameters.stretches)
            with self._workspace.beside(True):
                self._table.fingerprints.zero_()
            self._parameters = parameters
            self.renewed += len(parameters.stretches)
            return
        self._parameters, self._found = parameters, None
        self._next, self._began_s = 0, None
        if not parameters.stretches:
            self._table = None
            return
        ranges, keys = [stretch.range for stretch in parameters.stretches], self._state.sources.fingerprint_keys
        self._table = WeightTable(ranges, self._workspace.device, keys)
        if first and not self._pace.off:
            with self._workspace.beside(True):
                self._workspace.backend.compare_weights(self._state, self._table, 0, self._table.chunks)
        self._tell_guarded(self._table)

    def _advance(self) -> bool:
        """Does the next thing with an arrived copy; returns whether there was one."""
        if self._table is None:
            return False
        if self._looked is not None:
            copy, suspects = self._looked
            if not copy.arrived():
                return False
            self._looked = None
            self._judge(self._table, copy, suspects)
            return True
        if self._waiting and self._found is not None:
            if not self._found.arrived():
                return False
            self._waiting = False
            rows = self._rows(self._table, self._found)
            if rows and self._whole:
                self._look(self._table, rows)
            elif rows:
                self._suspicion = True
            return True
        if self._suspicion:
            self._suspicion = False
            self._compare(self._table, 0, self._table.chunks, whole=True)
            return True
        return False

    def _walk(self, table: WeightTable) -> None:
        """Compares the next chunks."""
        if self._began_s is None:
            self._began_s = self._pace.busy_s
        most = self._pace.scrub_bytes(self._pace.forwards) * table.chunks // max(table.guarded_bytes, CHUNK_BYTES)
        count = min(max(most, 1), table.chunks - self._next)
        self._compare(table, self._next, count, whole=False)
        self._next += count
        if self._next == table.chunks:
            self._next = 0
            self.rounds += 1
            self.period_s = self._pace.busy_s - self._began_s
            self._began_s = self._pace.busy_s

    @torch.inference_mode(False)
    def _compare(self, table: WeightTable, first: int, count: int, whole: bool) -> None:
        stretches = self._parameters.stretches
        begin = bisect_right(table.firsts, first) - 1
        end = bisect_right(table.firsts, first + count - 1)
        with self._workspace.beside(True):
            for number in range(begin, end):
                if stretches[number].moved():
                    self._renew(table, number)
                if not stretches[number].there:
                    # Its memory may be anybody's: nothing is read before all are looked for again.
                    self._stale = True
            if self._stale:
                return
            table.begin()
            self._workspace.backend.compare_weights(self._state, table, first, count)
            if self._found is None:
                self._found = HostCopy(table.found)
            else:
                self._found.start(table.found)
        self._waiting, self._whole = True, whole
        self.compared_chunks += count

    def _renew(self, table: WeightTable, number: int) -> None:
        stretch = self._parameters.stretches[number]
        stretch.disturbed = self.rounds
        first, end = table.firsts[number], table.firsts[number] + stretch.range.chunks
        self._told = {chunk: found for chunk, found in self._told.items() if not first <= chunk < end}
        table.forget(number)
        self.renewed += 1

    def _rows(self, table: WeightTable, copy: HostCopy) -> list[tuple[int, int]]:
        """The differing chunks, without told ones, each with the fingerprint now. None of a parameter with a change
        known to torch."""
        (found,) = copy.tensors
        count, *rows = found.tolist()
        if count[0] > ROOM:
            rows = rows[:ROOM]
        rows = [(chunk, value) for chunk, value in rows[: count[0]] if self._told.get(chunk) != value]
        moved = {number for number in {self._number(table, chunk) for chunk, _ in rows} if self._moved(table, number)}
        rows = [(chunk, value) for chunk, value in rows if self._number(table, chunk) not in moved]
        if rows and self._whole and count[0] > ROOM:
            self._say_unsure(table, {self._number(table, chunk) for chunk, _ in rows}, "many parts changed")
            self._stale = True
            return []
        return rows

    @torch.inference_mode(False)
    def _look(self, table: WeightTable, rows: list[tuple[int, int]]) -> None:
        """Begins to read the bytes of differing chunks."""
        if len(rows) > MOST_LOOKED:
            self._say_unsure(table, {self._number(table, chunk) for chunk, _ in rows}, "many parts changed")
            return
        tensors = []
        with self._workspace.beside(True):
            for chunk, _ in rows:
                begin, end = self._bytes(table, chunk)
                tensors.append(table.ranges[self._number(table, chunk)].read()[begin:end])
            tensors.append(torch.stack([table.fingerprints[chunk] for chunk, _ in rows]))
            self._looked = HostCopy(*tensors), rows

    def _judge(self, table: WeightTable, copy: HostCopy, rows: list[tuple[int, int]]) -> None:
        """Tells of damage, and counts possible updates."""
        *data, stored = copy.tensors
        changes: dict[int, Change] = {}
        restless: set[int] = set()
        for (chunk, found), now, before in zip(rows, data, stored.tolist(), strict=True):
            number = self._number(table, chunk)
            if self._stale or self._moved(table, number):
                continue
            if fingerprint(table, now) != found or not before:
                restless.add(number)
                continue
            stretch = self._parameters.stretches[number]
            change = Change(stretch, *self._bytes(table, chunk), found, now.clone())
            changes[chunk] = change.solved(before, table.fingerprint_keys)
        doubtful = unsure(changes, self.rounds)
        if restless or doubtful:
            numbers = restless | {self._number(table, chunk) for chunk in doubtful}
            self._say_unsure(table, numbers, "it may be an update that nobody has told of")
        for chunk in doubtful:
            del changes[chunk]
        self._told |= {chunk: change.found for chunk, change in changes.items()}
        if changes:
            self.report([violation(change, self._step) for change in changes.values()])

    def _moved(self, table: WeightTable, number: int) -> bool:
        """Whether torch knows of a change of a range since the last question; then the content is taken anew."""
        stretch = self._parameters.stretches[number]
        moved = stretch.moved()
        if moved:
            with self._workspace.beside(True):
                self._renew(table, number)
        self._stale |= not stretch.there
        return moved

    def _say_unsure(self, table: WeightTable, numbers: set[int], why: str) -> None:
        """The content of ranges has changed, perhaps rightly: the present content is taken."""
        stretches = [self._parameters.stretches[number] for number in sorted(numbers)]
        self.unsure += 1
        with self._workspace.beside(True):
            for number, stretch in zip(sorted(numbers), stretches, strict=True):
                self._renew(table, number)
                stretch.unsure += len(numbers) <= MOST_STRETCHES
                if stretch.unsure == MOST_UNSURE:
                    stretch.left_out = True
                    table.leave_out(number)
        if self.unsure & (self.unsure - 1) == 0:
            fields = {"reason": why, "parameters": [stretch.name for stretch in stretches[:8]], "times": self.unsure}
            self._switch.tell(Event("weights_unsure", "warning", fields))

    def _number(self, table: WeightTable, chunk: int) -> int:
        return bisect_right(table.firsts, chunk) - 1

    def _bytes(self, table: WeightTable, chunk: int) -> tuple[int, int]:
        """First byte of a chunk in the range, and the first behind the chunk."""
        number = self._number(table, chunk)
        whole = table.ranges[number]
        begin = (chunk - table.firsts[number]) * whole.chunk_bytes
        return begin, min(begin + whole.chunk_bytes, whole.size_bytes)

    def _left_out(self) -> dict[str, str]:
        alive = {s.name: "written while serving" for s in self._parameters.stretches if s.left_out}
        return {**self._parameters.left_out, **alive}

    def _tell_guarded(self, table: WeightTable) -> None:
        left_out = self._left_out()
        summary = f"weights: {self._parameters.parameters} parameters, {size_text(table.guarded_bytes)}"
        if left_out:
            summary += f"; left out: {counted(list(left_out.values()))}"
        fields = {
            "summary": summary,
            "parameters": self._parameters.parameters,
            "bytes": table.guarded_bytes,
            "memory_bytes": table.memory_bytes,
            "left_out": len(left_out),
        }
        self._switch.tell(Event("weights_guarded", "info", fields))

    def _say_unguarded(self) -> None:
        """No byte of weights is compared."""
        self._without += 1
        if self._without == MOST_WITHOUT:
            reason = "no parameter was handed to Canary.guard_weights"
            if self._pace.off:
                reason = "CANARY_SCRUB_BUDGET is 0"
            elif self._models:
                reason = f"no parameter can be read: {counted(list(self._left_out().values())) or 'there is none'}"
            self._switch.tell(Event("weights_unguarded", "info", {"reason": f"weights: {reason}"}))
