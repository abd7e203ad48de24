"""The common host side of the kernels: arguments, and a launch of a few microseconds.

Triton's own launch inspects every argument and every constant of the module each time: tens of microseconds for long
argument lists. Here arguments are inspected once in their life, a region's once for good and a batch's once a forward,
and a kernel already compiled for such arguments is launched directly.
"""

import inspect
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from functools import cache, partial
from typing import Any

import torch
import triton
from torch import Tensor

from canary_core.batch import BatchView, SlotTable
from canary_core.ops.compile_process import CompileProcess
from canary_core.ops.kernels.compile_jobs import CompileJob, Stamp, job_of, pack, settle_name
from canary_core.ops.kernels.fields import BatchFields, RegionFields, SourceFields, TableFields
from canary_core.ops.kernels.tiles import Tiles, constants
from canary_core.ops.launches import (
    LATE,
    Arguments,
    BatchArguments,
    GroupLaunch,
    Numbers,
    TableConstants,
    TableLaunches,
)
from canary_core.ops.sources import SourceGroup
from canary_core.ops.state import RegionState

INTERPRETED_PROGRAMS = 3
"""Programs on the interpreter: few, so that each goes round its loop."""

VARYING = ("rows", "tokens", "width", "extent", "write_length", "map_length", "expected_width", "expected_stride")
"""Parameters that differ from batch to batch: no new compilation for a 1 or a multiple of 16, so none is a member of a
tuple, where Triton compiles a 1 in all the same. None is part of an address, except ``expected_stride``: the length of
sequences, where each forward has a new list."""

UNALIGNED = ("p_slots", "p_write_slots", "p_expected")
"""Parameters cut by engines out of larger tensors, at any offset: no new compilation for another alignment."""

SPECIALISED_LESS = "do_not_specialize_on_alignment" in inspect.signature(triton.jit).parameters

KNOWN_LAUNCHER = triton.__version__.startswith("3.6.")
"""Whether `_launch_of` knows the C function of the installed Triton."""

ROW_STEPS = (256, 1024, 4096, 16384, 65536)
"""Batch rows compiled for; fewer steps mean fewer pauses to compile while an engine serves."""

MOST_PROGRAMS = 32768
"""Most programs over slots or tokens; CUDA allows 65,535 in the same dimension of a grid."""

MOST_COMPILERS = 8
"""Threads that compile at a time: the rest of the machine is the engine's."""

_kinds: dict[tuple[Any, ...], int] = {}
_instead: ContextVar["Callable[[Launcher, tuple[int, int], Arguments], object] | None"] = ContextVar(
    "_instead", default=None
)
"""Set within `compile_together` and `compile_beside`: takes a kernel not yet compiled, in place of a launch. Other
threads go on launching."""
_compiling = threading.RLock()
"""Held while kernels are compiled and loaded, against a launch by somebody else."""


def jit(*varying: str) -> Callable[[Any], Any]:
    """`triton.jit` for rarely compiled kernels: nothing about the parameters ``varying`` is built in, nor the alignment
    of `UNALIGNED` ones, if the installed Triton can leave it out."""
    options = {"do_not_specialize_on_alignment": UNALIGNED} if SPECIALISED_LESS else {}
    decorate: Callable[[Any], Any] = triton.jit(do_not_specialize=varying, **options)
    return decorate


NO_ARGUMENTS = Arguments((), [], -1)


def arguments(*objects: Tensor | int | tuple[Any, ...] | None) -> Arguments:
    """Inspects each of ``objects``, and each member of a tuple, the way Triton specialises: type, alignment to 16,
    equality to 1."""
    seen: list[Any] = []
    raw = _inspected(objects, seen.append)
    return Arguments(objects, raw, _kinds.setdefault(tuple(seen), len(_kinds)))


def _inspected(objects: tuple[Any, ...], note: Callable[[Any], None]) -> list[Any]:
    raw: list[Any] = []
    # Each forward has a dozen tensors of its own.
    add = raw.append
    for value in objects:
        if value is None:
            add(None)
            note(None)
        elif isinstance(value, Tensor):
            address = value.data_ptr()
            add(address)
            note(value.dtype)
            if address & 15:
                note(False)
        elif isinstance(value, tuple):
            add(tuple(_inspected(value, note)))
        else:
            add(value)
            note((value == 1, value & 15 == 0, -(1 << 31) <= value < 1 << 31))
    return raw


def joined(first: Arguments, second: Arguments) -> Arguments:
    """``second`` after ``first``."""
    kind = _kinds.setdefault((first.kind, second.kind), len(_kinds))
    return Arguments(first.objects + second.objects, first.raw + second.raw, kind)


class Launcher:
    """One kernel for one region, with everything common to all forwards: the first arguments, the compile-time
    constants in the order of the kernel's parameters, and Triton's options, such as ``num_warps``.

    device: index of the GPU, None on a CPU. columns: programs in the grid's first dimension, where the number is fixed.
    """

    __slots__ = (
        "_compiled", "_compiling", "_constants", "_fixed", "_options", "_raw", "_unread", "columns", "device", "kernel",
    )  # fmt: skip

    def __init__(
        self, kernel: Any, state: RegionState, fixed: tuple[Arguments, ...], constants: dict[str, Any],
        columns: int = 0, **options: int,
    ) -> None:  # fmt: skip
        self.kernel = kernel
        self.columns = columns
        self._fixed = tuple(value for part in fixed for value in part.objects)
        self._raw = tuple(value for part in fixed for value in part.raw)
        self._constants = constants
        # A compiled kernel wants something in the place of each constant and looks at none.
        self._unread = (None,) * len(constants)
        self._options = options
        self.device = state.records.device.index
        self._compiled: dict[int, Any] = {}
        self._compiling: dict[int, threading.Thread] = {}
        settle_name(kernel)

    def ready(self, grid: tuple[int, int], given: Arguments) -> bool:
        """Whether a launch with such arguments needs no compilation. If not, compilation begins in a thread, and some
        later call returns True. For work that can be left out meanwhile; never captured."""
        if given.kind in self._compiled:
            return True
        thread = self._compiling.get(given.kind)
        if thread is None:
            compile_ = partial(self._compile, grid, given)
            thread = self._compiling[given.kind] = threading.Thread(target=compile_, name="canary-compile", daemon=True)
            thread.start()
        return not thread.is_alive()

    def _compile(self, grid: tuple[int, int], given: Arguments) -> None:
        if self.device is not None:
            torch.cuda.set_device(self.device)
        # An error comes again with the launch, where it is told.
        with suppress(Exception):
            _make_ready((self.device, self.warm_up(grid, given)))

    def warm_up(self, grid: tuple[int, int], given: Arguments) -> Any:
        """The kernel, compiled and not launched."""
        return self.kernel.warmup(*self._fixed, *given.objects, **self._constants, **self._options, grid=grid)

    def __call__(self, grid: tuple[int, int], given: Arguments = NO_ARGUMENTS) -> None:
        """Launches on the current stream with ``given`` after the fixed arguments. Never reads back, never allocates
        device memory; compiles on arguments of a new kind."""
        compiled = self._compiled.get(given.kind)
        if compiled is None:
            instead = _instead.get()
            if instead is not None:
                instead(self, grid, given)
                return
            began = time.perf_counter()
            with _compiling:
                compiled = self.kernel[grid](*self._fixed, *given.objects, **self._constants, **self._options)
            LATE.note(getattr(self.kernel, "__name__", ""), time.perf_counter() - began)
            # The interpreter gives None.
            if compiled is not None:
                launch, head = _launch_of(compiled)
                self._compiled[given.kind] = launch, (compiled.function, *head, *self._raw), _current_stream()
            return
        launch, first, stream = compiled
        launch(grid[0], grid[1], 1, stream(self.device), *first, *given.raw, *self._unread)


def _launch_of(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Function and constants that launch a kernel: called with a grid of three numbers, a stream, a function, the
    constants, then the kernel's arguments. Without hooks of profilers; and without Triton's Python in between, where
    the C function is known and needs no memory: nearly half of a launch's host time."""
    run, metadata = compiled.run, compiled.packed_metadata
    known = KNOWN_LAUNCHER and type(run).__name__ == "CudaLauncher"
    if known and not (run.global_scratch_size or run.profile_scratch_size):
        how = (run.launch_cooperative_grid, run.launch_pdl)
        return run.launch, (*how, None, None, metadata, None, None, None)
    return run, (metadata, None, None, None)


def compile_together(launches: Callable[[], None]) -> None:
    """Compiles everything that ``launches`` would launch for the first time, side by side, without launching: all is
    ready then. A Triton without this ability does nothing, and the first launches compile one after the other."""
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None:
        return

    def collect() -> None:
        found: list[tuple[int | None, Any]] = []
        _instead.set(lambda launcher, grid, given: found.append((launcher.device, launcher.warm_up(grid, given))))
        with _compiling, ThreadPoolExecutor(MOST_COMPILERS) as threads, mode(threads):
            launches()
            # Behind all that compiles in the same threads, so a kernel is made ready while others still compile.
            list(threads.map(_make_ready, found))

    # Triton's mode stays on where an error ends it, so it gets a context of its own: the engine compiles too.
    copy_context().run(collect)


def _make_ready(compiled: tuple[int | None, Any]) -> None:
    """The last steps before a kernel's first launch: loading; and Triton up to 3.6 has a C compiler make a launcher for
    the parameters, a third of a second each."""
    device, kernel = compiled
    # An error comes again with the launch, where it is told.
    with suppress(Exception):
        if device is not None:
            torch.cuda.set_device(device)
        # Compiled in the mode, it is a promise of a kernel.
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        kernel.run  # noqa: B018  (a property that does it)


def compile_beside(launches: Callable[[], None], running: Sequence[CompileProcess]) -> CompileProcess | None:
    """Compiles in another process everything that ``launches`` would launch for the first time, except the jobs of
    ``running``; nothing is launched or compiled here. None where everything was compiled in an earlier start, or where
    this Triton can't be asked. Raises `OSError` where no process can start."""
    try:
        jobs = copy_context().run(_jobs_of, launches)
        left = [job for key, job in jobs.items() if not any(key in process.keys for process in running)]
        if not left or (stamp := Stamp(left)).there:
            return None
        work = pack(left)
    except Exception:  # It comes again with the launch, where it is told.
        return None
    folder = None if stamp.folder is None else str(stamp.folder.parent)
    return CompileProcess(work, frozenset(job.key for job in left), folder, stamp.put)


def _jobs_of(launches: Callable[[], None]) -> dict[str, CompileJob]:
    """Jobs by name, in the order of ``launches``. Runs in a context of its own, since it changes what launches do."""
    jobs: dict[str, CompileJob] = {}

    def note(launcher: Launcher, grid: tuple[int, int], given: Arguments) -> None:
        job = job_of(launcher.kernel, partial(launcher.warm_up, grid, given))
        if job is not None:
            jobs[job.key] = job

    _instead.set(note)
    with _compiling:
        launches()
    return jobs


def region_arguments(state: RegionState) -> Arguments:
    """``region``: the first argument of every kernel."""
    shared, scratch, null = state.shared, state.scratch, state.region.null_range
    fields = RegionFields(
        state.records.view(torch.int64), state.records, scratch.claims, scratch.plan, scratch.heads, state.chains,
        state.cursors, shared.counters, shared.clock, shared.ring, shared.ring_rows, state.index,
        state.region.slots, null.start, null.stop,
    )  # fmt: skip
    return arguments(fields)


def source_arguments(state: RegionState, group: SourceGroup) -> Arguments:
    """``sources``."""
    sources = state.sources
    weights = sources.sums.device_weights if sources.sums else sources.salts
    tensors = sources.descriptors, group.columns, sources.keys, sources.salts, weights, state.fingerprints
    return arguments(SourceFields(*tensors, sources.columns, len(sources)))


def batch_arguments(state: RegionState, batch: BatchView, table: SlotTable) -> tuple[Arguments, TableLaunches]:
    """``batch, p_expected, table, p_write_slots, expected_width, expected_stride, width, table_stride, extent,
    map_length, write_length, rows, tokens``, and the launches with the matching compile-time constants. Made once a
    forward, the numbers only after a change."""
    cache = state.launches
    last = cache.batch
    if last is not None and last.batch is batch and last.table is table:
        return last.given, last.launches
    writes, slot_map, expected = table.write_slots, state.region.slot_map, batch.expected_tokens
    if expected is not None and expected.numel() == 0:
        expected = None
    width, stride, extent = table.bounds
    values = (
        0 if expected is None else expected.shape[1], 0 if expected is None else expected.stride(0), width, stride,
        extent, 0 if slot_map is None else slot_map.shape[0], 0 if writes is None else writes.shape[0], batch.rows,
        batch.tokens,
    )  # fmt: skip
    numbers = last.numbers if last is not None and last.numbers.objects == values else arguments(*values)
    own = batch.prefix_lens, batch.new_lens, batch.writers, batch.anchors, batch.token_ids, batch.positions
    tensors = arguments(BatchFields(*own), expected, TableFields(table.entries, table.rows, slot_map), writes)
    given, launches = joined(tensors, numbers), _table_launches(state, table, batch.rows)
    cache.batch = BatchArguments(batch, table, numbers, given, launches)
    return given, launches


def _table_launches(state: RegionState, table: SlotTable, rows: int) -> TableLaunches:
    """Launches for a batch of ``rows`` rows with ``table``."""
    step = bisect_left(ROW_STEPS, rows)
    key = table.page_size, table.ring_slots, table.stored_tokens, table.pool_page, step
    known = state.launches.by_table.get(key)
    if known is None:
        region = state.region
        constants = TableConstants(
            table.page_size, table.ring_slots, table.stored_by(region), region.attention_window,
            -1 if region.chunked else region.group_tokens,
            ROW_STEPS[step], *Numbers.of(table.pool_page, region.page_ring, region.tokens_per_slot),
        )  # fmt: skip
        known = state.launches.by_table[key] = TableLaunches(constants, {})
    return known


@cache
def _current_stream() -> Callable[[int], int]:
    """Triton's function for the current stream of a device."""
    found: Callable[[int], int] = triton.runtime.driver.active.get_current_stream
    return found


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def register_limit(state: RegionState, registers: int) -> dict[str, int]:
    """Triton's option to limit a memory-bound kernel to ``registers`` a thread, so that more threads are resident; only
    NVIDIA's back end has the option."""
    nvidia = state.records.device.type == "cuda" and torch.version.hip is None
    return {"maxnreg": registers} if nvidia else {}


def programs(state: RegionState, per_processor: int) -> int:
    """Size of a persistent grid: depends on the device only, so a captured launch fits every batch. 0 a processor gives
    `MOST_PROGRAMS`."""
    device = state.records.device
    if device.type == "cpu":
        return INTERPRETED_PROGRAMS
    return processors(device) * per_processor or MOST_PROGRAMS


def launch_over(state: RegionState, op: str, kernel: Any, tiles: Tiles, slots: Tensor) -> None:
    """Launches ``kernel`` once for each source group of the region, over a list of slots; the list and its length
    follow the arguments of `group_launches`."""
    launch_groups(group_launches(state, op, kernel, tiles), slots.shape[0], arguments(slots, slots.shape[0]))


def launch_groups(launches: Sequence[GroupLaunch], slots: int, given: Arguments) -> None:
    """Launches each of `group_launches` with as many programs as so many ``slots`` need."""
    for launch in launches:
        needed = max(-(-slots // launch.slots), 1)
        launch.launch((launch.blocks, min(needed, launch.programs)), given)


def group_launches(
    state: RegionState,
    op: str,
    kernel: Any,
    tiles: Tiles,
    table: TableConstants | None = None,
    groups: Sequence[SourceGroup] | None = None,
) -> list[GroupLaunch]:
    """One for each source group of the region, or of ``groups``: always the same ones for an ``op``."""
    known = state.launches.by_group.get((op, table))
    if known is None:
        known = state.launches.by_group[op, table] = []
        for group in state.sources.groups if groups is None else groups:
            tile = tiles.of(state, group)
            fixed = (region_arguments(state), source_arguments(state, group))
            every = ({"TABLE": table} if table else {}) | {"BYTES": constants(group, tile)}
            blocks = -(-len(group.columns) // max(tile.abreast, 1))
            # Rounded down: with a program more for each block some would not fit, and run when the others are done.
            over_slots = max(programs(state, tile.programs) // (blocks if tile.programs else 1), 1)
            limit = register_limit(state, tile.registers) if tile.registers else {}
            launcher = Launcher(kernel, state, fixed, every, num_warps=tile.warps, **limit)
            known.append(GroupLaunch(blocks, over_slots, tile.slots, tile.abreast, launcher))
    return known
