"""Launches every op before the first forward, so that no request waits for a compiler."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from canary_core.batch import BatchView, SlotTable
from canary_core.errors import AttachError
from canary_core.ops.backends import Backend
from canary_core.ops.blocks import BlockShape
from canary_core.ops.compile_process import CompileProcess
from canary_core.ops.launches import LaunchCache
from canary_core.ops.repair_rows import REPAIR_WORDS
from canary_core.ops.state import RegionState
from canary_core.read_table import MOST_LENS, ReadLens, ReadTable
from canary_core.recomputer import Computed
from canary_core.records import BLOCK_VALUES, Cursor, Happened
from canary_core.runtime.streams import capturing


def row_counts(steps: Sequence[int], most: int) -> list[int]:
    """The smallest batch, and the largest of each step up to ``most`` rows: forwards of many rows and long tables have
    a form of their own (`canary_core.ops.readers`)."""
    below = [step for step in (1, *steps) if step < most]
    return [*below, most] if steps and most > 0 else []


def compile_all(
    backend: Backend, states: Mapping[str, RegionState], batches: Sequence[BatchView], also: Callable[[], None]
) -> None:
    """Compiles everything needed by `warm_up`, and everything launched by ``also``, side by side if the back end can;
    launches nothing. Raises `AttachError` during a graph capture."""
    _require_no_capture(states)
    if backend.compile_together is not None and _compiles(states):
        with _no_trace(states):
            backend.compile_together(partial(_launch_with, backend, states, batches, also))


def compile_beside(
    backend: Backend,
    states: Mapping[str, RegionState],
    batches: Sequence[BatchView],
    also: Callable[[], None],
    running: Sequence[CompileProcess],
) -> CompileProcess | None:
    """`compile_all` in another process, without the jobs of ``running``. None where nothing is left, or the back end
    can't. Raises `AttachError` during a graph capture, and `OSError` where no process can start."""
    _require_no_capture(states)
    if backend.compile_beside is None or not _compiles(states):
        return None
    with _no_trace(states):
        return backend.compile_beside(partial(_launch_with, backend, states, batches, also), running)


def compile_later(backend: Backend, states: Mapping[str, RegionState], batch: BatchView) -> CompileProcess | None:
    """In another process: what engines that serve launch later than with their first forward, for batches like
    ``batch``. Touches no slot and no counter. None where nothing is left, or the back end can't. Raises `OSError` where
    no process can start."""
    if backend.compile_beside is None or not _compiles(states):
        return None
    kept = {name: state.launches for name, state in states.items()}
    try:
        for state in states.values():
            # What this process has compiled would be launched.
            state.launches = LaunchCache()
        return backend.compile_beside(partial(_launch_later, backend, states, batch), ())
    finally:
        for name, state in states.items():
            state.launches = kept[name]


def warm_up(backend: Backend, states: Mapping[str, RegionState], batches: Sequence[BatchView]) -> None:
    """Launches every op on each of ``batches``, of padding only, and leaves no trace: counters, cursors and the step
    are put back. Never captured."""
    with _no_trace(states):
        _launch(backend, states, batches)


def _require_no_capture(states: Mapping[str, RegionState]) -> None:
    if any(capturing(state.cursors.device) for state in states.values()):
        raise AttachError("warm_up can't be captured in a graph; call it when the engine starts")


def _compiles(states: Mapping[str, RegionState]) -> bool:
    """Whether anything is compiled: the interpreter compiles nothing."""
    return all(state.records.device.type != "cpu" for state in states.values())


@contextmanager
def _no_trace(states: Mapping[str, RegionState]) -> Iterator[None]:
    """Context: restores the ops' counters, clock and cursors."""
    shared = next(iter(states.values())).shared
    kept = [shared.counters, shared.clock, *(state.cursors for state in states.values())]
    copies = [tensor.clone() for tensor in kept]
    yield
    for tensor, copy in zip(kept, copies, strict=True):
        tensor.copy_(copy)


def _launch_with(
    backend: Backend, states: Mapping[str, RegionState], batches: Sequence[BatchView], also: Callable[[], None]
) -> None:
    _launch(backend, states, batches)
    also()


def _launch(backend: Backend, states: Mapping[str, RegionState], batches: Sequence[BatchView]) -> None:
    # What takes longest to compile begins first.
    for launch in (_launch_longest, _launch_forward):
        for batch in batches:
            for name, table in batch.tables.items():
                launch(backend, states[name], batch, table)
    for name in dict.fromkeys(name for batch in batches for name in batch.tables):
        _launch_beside(backend, states[name])


def _launch_longest(backend: Backend, state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """The ops on a batch that take twice as long to compile as any other."""
    state.require_capacity(batch)
    # Nothing is compared, and nothing listed.
    state.cursors[Cursor.SCRUB_SLOTS].fill_(0)
    state.cursors[Cursor.SCRUB :].zero_()
    backend.check(state, batch, table)
    if state.sources:
        backend.fingerprint_record(state, batch, table)


def _launch_forward(backend: Backend, state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """The other ops on a batch, after `check` of all: nothing is planned."""
    backend.record(state, batch, table)
    if state.region.tokens_per_slot == 1:
        lens = batch.prefix_lens
        # What an engine keeps is the table itself, or lists that are copied, with a row for some requests only.
        given = (ReadLens("padding", lens, lens),) * MOST_LENS
        for kept, count in ((table, 1), (replace(table, rows=lens.int()), MOST_LENS)):
            padding = ReadTable(
                "padding", state.region.name, table, kept, lens, lens, batch.writers, lens=given[:count]
            )
            backend.compare_tables(state, padding, [0] * (1 + count), True)
    if state.reads:
        backend.read_check(state, batch, table)
    if state.sources:
        backend.fingerprint(state, batch, table)
    if state.stores.numel():
        backend.note_store(state, batch, range(len(state.sources)))
        backend.compare_stores(state, batch, table)


def _launch_later(backend: Backend, states: Mapping[str, RegionState], batch: BatchView) -> None:
    for name, table in batch.tables.items():
        if states[name].sources:
            backend.fingerprint_record(states[name], batch, table)
        _launch_beside(backend, states[name])


def _launch_beside(backend: Backend, state: RegionState) -> None:
    """The ops that are given slots, or look for slots; after `_launch_forward`, so that there are none to look for."""
    if state.sources:
        backend.scrub(state, False)
        backend.scrub(state, True)
    none = torch.empty(0, dtype=torch.int64, device=state.records.device)
    backend.verify(state, none, 1)
    backend.adopt(state, none)
    if state.repairs:
        backend.repair(state, none.new_empty(0, REPAIR_WORDS))
    if state.recomputes:
        _launch_compare_kv(backend, state)
    rows = state.fingerprints.new_empty((1, BLOCK_VALUES + state.sources.columns))
    for paged in (True, False):
        backend.gather_blocks(state, none.new_full((1,), -1), BlockShape(1, paged), rows, 0)
    for writer in (-1, none.int()):
        for event in (backend.alloc, backend.park, backend.share, backend.evict, backend.free):
            event(state, none, writer, 1)
        backend.note(state, none, Happened.ARRIVE, writer)
    backend.note(state, none, Happened.COPY, none)


def _launch_compare_kv(backend: Backend, state: RegionState) -> None:
    """The KV against itself, of no slot."""
    from canary_core.ops.torch.compare_kv import elements

    columns = [i for i, source in enumerate(state.region.sources) if elements(source)]
    nowhere = torch.full((1,), -1, dtype=torch.int64, device=state.records.device)
    again = Computed(tuple(state.region.sources[column] for column in columns), nowhere)
    backend.compare_kv(state, columns, nowhere, again, torch.zeros(2, len(columns), 1, device=nowhere.device))
