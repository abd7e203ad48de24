"""Rows of findings in a ring that is full, on both back ends. Which ones of a kind are kept is free, as is the order of
atomics."""

import pytest
import torch
from ops.scenario import list_slots
from ops.test_scrub import BACKENDS, state_of

from canary_core.guard.reporting.readback import ReadBack
from canary_core.records import KIND_ROWS, POSITION, Kind, Row, State

SLOTS, RING_ROWS = 200, 64
"""Of the region, and of the ring of `state_of`."""


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_the_first_rows_of_each_kind_are_kept_beside_a_storm_of_another(backend, device):
    """In each read anew, each once; what has no row is counted. With atomics of a GPU the first ones in the ring need
    not be the first of their kind, so the storm itself may have some more."""
    state = state_of(SLOTS, device)
    state.records[:, POSITION] = int(State.WRITTEN)
    state.sources[0].tensor[:, 2] ^= 8
    reads = ReadBack(state.shared)
    for turn, outside in enumerate((3, 0, KIND_ROWS, 20, 1)):
        list_slots(state, range(SLOTS))
        backend().scrub(state)
        beyond = SLOTS + 100 * turn + torch.arange(outside, device=device)
        backend().free(state, beyond, -1)
        snapshot = reads.collect_now()
        kept = min(outside, KIND_ROWS)
        told = {kind: [row[Row.SLOT] for row in snapshot.rows if row[Row.KIND] == kind] for kind in Kind}
        assert len(set(told[Kind.BYTES])) == len(told[Kind.BYTES])
        assert RING_ROWS <= len(told[Kind.BYTES]) <= RING_ROWS + KIND_ROWS * (device != "cpu")
        assert len(set(told[Kind.SLOT_RANGE]) & set(beyond.tolist())) == len(told[Kind.SLOT_RANGE]) == kept
        assert len(snapshot.rows) == len(told[Kind.BYTES]) + kept
        assert snapshot.dropped == SLOTS + outside - len(snapshot.rows)
        assert [row[Row.SEQUENCE] for row in snapshot.rows] == sorted({row[Row.SEQUENCE] for row in snapshot.rows})


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_rows_in_the_ring_are_among_the_first_of_their_kind(backend, device):
    """A kind with some in the ring has so many less behind it, unless atomics of a GPU come in another order."""
    state = state_of(SLOTS, device)
    state.records[:, POSITION] = int(State.WRITTEN)
    state.sources[0].tensor[: RING_ROWS - 3, 2] ^= 8
    list_slots(state, range(SLOTS))
    backend().scrub(state)
    backend().free(state, SLOTS + torch.arange(20, device=device), -1)
    snapshot = ReadBack(state.shared).collect_now()
    kept = sum(row[Row.KIND] == Kind.SLOT_RANGE for row in snapshot.rows)
    assert KIND_ROWS <= kept <= KIND_ROWS + 3 * (device != "cpu")
    assert (len(snapshot.rows), snapshot.dropped) == (RING_ROWS - 3 + kept, 20 - kept)
