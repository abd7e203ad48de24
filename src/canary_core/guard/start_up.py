"""`StartUp`: Canary's work before an engine's first forward."""

import contextlib
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import partial

import pluggy

from canary_core.batch import Batches, BatchView
from canary_core.errors import AttachError
from canary_core.events import Event
from canary_core.guard.step import Step
from canary_core.guard.warm_up import compile_all, compile_beside, compile_later, row_counts, warm_up
from canary_core.ops.compile_process import CompileProcess
from canary_core.ops.launches import LATE
from canary_core.ops.state import RegionState
from canary_core.runtime.streams import capturing, synchronize
from canary_core.runtime.telling import emit
from canary_core.runtime.workspace import Switch, Workspace

PROGRESS_S = 10.0
"""Seconds between two events about a start that takes long."""


class StartUp:
    """Compiles the launches of forwards, fingerprints the pool if still to do, and launches every op once.

    Another process compiles, whose forks don't wait for this one's interpreter lock. The rest follows at once; or,
    while that process compiles, as late as possible: before the first forward, or the first event
    of slots, whichever calls `Switch.put_off` first. The GPU is not touched in between, so a graph can be captured
    meanwhile.
    """

    def __init__(self, workspace: Workspace, switch: Switch, step: Step) -> None:
        self._workspace = workspace
        self._switch = switch
        self._step = step
        self._scrub = step.scrub
        self._views: list[BatchView] = []
        self._processes: list[CompileProcess] = []
        self._unable = ""
        self._seconds = 0.0
        self._lock = threading.RLock()
        # Until this start is done as well.
        LATE.begun = False

    def begin(self, batches: Batches, most_rows: int, beside: bool) -> None:
        """Starts up for batches of up to ``most_rows`` rows, see `Canary.warm_up`. ``beside``: the work may be put off
        until another process has compiled. Raises `AttachError` during a graph capture, and for a view that does not
        fit."""
        with self._lock:
            began = time.perf_counter()
            views = list(self._padding(batches, most_rows))
            self._views += views
            try:
                process = compile_beside(
                    self._workspace.backend, self._workspace.states, views, self._first_launches, self._processes
                )
            except OSError as error:
                process, self._unable = None, f"no process can compile beside: {error}; all was compiled here"
            if process is not None:
                self._processes.append(process)
            self._seconds += time.perf_counter() - began
            if beside and self._processes:
                self._switch.put_off = self.finish
            else:
                self._finish()

    def finish(self) -> None:
        """Does the pending work, if any; other threads wait. An error during a graph capture, handled like any error of
        Canary."""
        with self._switch.guard("warm_up"), self._lock:
            if self._switch.put_off is not None:
                self._finish()

    def wait(self) -> None:
        """Until no process compiles any more."""
        for process in self._processes:
            process.wait()

    def give_up(self) -> None:
        """Nothing is put off any more, and no process compiles. Waits for nothing."""
        self._switch.put_off = None
        self._views.clear()
        while self._processes:
            self._processes.pop().end()

    def _padding(self, batches: Batches, most_rows: int) -> Iterator[BatchView]:
        for rows in row_counts(self._workspace.backend.row_steps, most_rows):
            for batch in batches(rows):
                self._step.require_place(batch)
                yield batch

    def _finish(self) -> None:
        if not self._switch.enabled:
            self.give_up()
            return
        began = time.perf_counter()
        backend, device = self._workspace.backend, self._workspace.device
        fields: dict[str, object] = {"backend": backend.name, "batches": len(self._views)}
        try:
            if self._processes:
                if capturing(device):
                    raise AttachError(
                        "what warm_up has put off can't be captured in a graph; call Canary.finish_warm_up before the "
                        "engine captures a guarded forward, or warm_up without beside"
                    )
                with self._progress("another process compiles"):
                    self.wait()
                fields |= self._beside()
                # The streams on which slots change need not be the one on which this begins.
                synchronize(device)
                with self._processes[-1].same_cache(), self._progress("ops are launched once"):
                    self._launch()
                synchronize(device)
                for process in self._processes:
                    process.remember()
            else:
                with self._progress("ops are compiled and launched once"):
                    self._launch()
                if self._unable:
                    fields["reason"] = self._unable
            self._seconds += time.perf_counter() - began
            fields["seconds"] = round(self._seconds, 2)
        finally:
            self._seconds = 0.0
            self.give_up()
        if fields["batches"]:
            LATE.begun = True
            self._switch.tell(Event("warmed_up", fields=fields))

    @contextlib.contextmanager
    def _progress(self, doing: str) -> Iterator[None]:
        """Tells every `PROGRESS_S` seconds, on a thread of its own, that this is still going on."""
        done, began = threading.Event(), time.monotonic()

        def tell() -> None:
            while not done.wait(PROGRESS_S):
                fields = {"doing": doing, "batches": len(self._views), "seconds": round(time.monotonic() - began)}
                self._switch.tell(Event("starting", fields=fields))

        threading.Thread(target=tell, name="canary start", daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def _beside(self) -> dict[str, object]:
        """Fields of the report about ended processes."""
        told: dict[str, object] = {"beside_s": round(max(process.seconds for process in self._processes), 2)}
        codes = [process.code for process in self._processes if process.code]
        if codes:
            told["reason"] = f"a process that compiled beside ended with {codes[0]}; what it left was compiled here"
        return told

    def _launch(self) -> None:
        backend, states = self._workspace.backend, self._workspace.states
        compile_all(backend, states, self._views, self._first_launches)
        if not self._scrub.started:
            self._scrub.start()
        warm_up(backend, states, self._views)

    def _first_launches(self) -> None:
        """The launches of `Scrub.start`, if still to come."""
        if not self._scrub.started:
            self._scrub.launch_all()


class Alone:
    """Processes that compile while an engine serves: one at a time, and one for each sort of regions and batches in the
    life of this process. Each tells ``warmed_up`` when it has ended, also where its Canary is gone by then."""

    def __init__(self) -> None:
        self._sorts: set[object] = set()
        self._process: CompileProcess | None = None

    def begin(self, workspace: Workspace, switch: Switch, batches: Batches, rows: int) -> None:
        """Compiles what batches of ``rows`` rows launch later than in their first forward. Never waits; within a graph
        capture it does nothing, and while another process compiles it begins none."""
        began = time.perf_counter()
        backend, states = workspace.backend, workspace.states
        if not backend.row_steps or capturing(workspace.device):
            return
        if self._process is not None and self._process.runs():
            _put_off(states.values(), self._process)
            return
        (batch,) = batches(rows)
        sort = bisect_left(backend.row_steps, rows), batch.expected_tokens is None, *map(_sort, states.values())
        if sort in self._sorts:
            return
        self._sorts.add(sort)
        fields: dict[str, object] = {"backend": backend.name, "batches": 1, **switch.place.fields()}
        try:
            self._process = process = compile_later(backend, states, batch)
        except (OSError, RuntimeError) as error:  # The latter where no thread can start.
            fields |= {"seconds": 0.0, "reason": f"no process can compile beside: {error}; {LEFT}"}
            emit(Event("warmed_up", fields=fields), switch.hooks)
            return
        if process is None:
            return
        _put_off(states.values(), process)
        fields["seconds"] = round(time.perf_counter() - began, 2)
        # It keeps no memory of the Canary's.
        tell = partial(_tell_end, process, fields, switch.hooks)
        threading.Thread(target=tell, name="canary alone", daemon=True).start()


ALONE = Alone()

LEFT = "kernels are compiled when they are first launched"
"""The end of the reason where a process that compiles alone did not, or not all."""


def _put_off(states: Iterable[RegionState], process: CompileProcess) -> None:
    """An op that two others can stand for is not launched before the end of ``process``, which may be about to compile
    it."""
    for state in states:
        state.launches.compiling = process.runs


def _sort(state: RegionState) -> object:
    """The parts of a region for which kernels are compiled."""
    region = state.region
    sources = frozenset((s.page_size, s.chunks, s.chunk_bytes, s.dtype) for s in region.sources)
    return region.kind, region.attention_window, region.tokens_per_slot, len(region.sources), sources


def _tell_end(process: CompileProcess, fields: dict[str, object], hooks: pluggy.PluginManager) -> None:
    """Waits for ``process``, on a thread of its own."""
    process.wait()
    fields["beside_s"] = round(process.seconds, 2)
    if process.code:
        fields["reason"] = f"a process that compiled beside ended with {process.code}; {LEFT}"
    else:
        process.remember()
    emit(Event("warmed_up", fields=fields), hooks)
