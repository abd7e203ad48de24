"""All kernels on odd sizes, for ``compute-sanitizer``, which looks at every address they touch::

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \\
        python -m pytest tests/gpu -k sanitizer

Without torch's cache each tensor is an allocation of its own, so that one byte beyond it is seen. Few launches, since
each takes a hundred times as long there; what kernels compute is tested elsewhere.
"""

import pytest
import torch
from ops.scenario import disturb, events, history, notes, scenario, write

from canary_core.ops.backends import triton_backend
from canary_core.ops.payload import export_records, import_records
from canary_core.records import PROBE, Counter, Cursor, Kind, Row

SEEDS = range(12)
"""Between them every kind of region, layouts with tails and pages cut short, rows and tokens without use, tables and
write lists with numbers that are no slots."""


def run_kernels(seed: int, device: str) -> None:
    """Two forwards and their events on a random region, all ops; each of them has run to its end."""
    backend = triton_backend()
    s = scenario(seed, device)
    state = s.state(read_check=-1)
    # All slots and as many again: more than there are is cut.
    for word in (Cursor.SCRUB_SLOTS, Cursor.SCRUB_RUNNING, Cursor.SCRUB_PASS):
        state.cursors[word] = 2 * s.region.slots
    backend.baseline(state)
    for batch, table in history(s, steps=2):
        state.require_capacity(batch)
        disturb(s, state)
        backend.check(state, batch, table)
        backend.read_check(state, batch, table)
        write(s)
        backend.fingerprint(state, batch, table)
        backend.record(state, batch, table)
        backend.scrub(state)
        backend.verify(state, events(s))
        backend.free(state, events(s), 3)
        backend.alloc(state, events(s), -1)
        backend.note(state, *notes(s))
    slots = torch.tensor([-1, 0, s.region.slots - 1, s.region.slots, 1 << 40], device=device)
    import_records(state, slots, export_records(state, slots.flip(0)))
    counters = state.shared.counters.tolist()
    assert counters[Counter.CHECKED_FORWARDS] == 2
    assert counters[Counter.SCRUBBED_SLOTS] == 2 * s.region.slots
    found = [row for row in state.shared.ring.tolist() if row[Row.SEQUENCE]]
    rows, ring = counters[Counter.ROWS], state.shared
    assert min(rows, ring.ring_rows) <= len(found) <= min(rows, len(ring.ring))
    assert {row[Row.KIND] for row in found} == {kind for kind in (*Kind, PROBE) if counters[kind]}


@pytest.mark.gpu
@pytest.mark.parametrize("seed", SEEDS)
def test_sanitizer_finds_nothing(seed):
    """For a sanitizer: alone it says that every kernel runs to its end, and that its counts agree with its findings."""
    run_kernels(seed, "cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU, not interpreted")
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_sanitizer_selection_runs(seed):
    """The same on the interpreter, so that the selection is known to work where there is no GPU."""
    run_kernels(seed, "cpu")
