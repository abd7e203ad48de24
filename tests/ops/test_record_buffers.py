"""What is known of slots, as buffers that travel page by page beside the KV, and a payload in plain values."""

import torch
from ops.scenario import history, scenario

from canary_core.ops.backends import torch_backend
from canary_core.ops.payload import PayloadLayout, export_records
from canary_core.ops.record_buffers import RecordBuffers
from canary_core.ops.state import RegionState
from canary_core.records import POSITION, STATES, TOKEN, State


def recorded(seed: int = 3) -> RegionState:
    """A region with records of a few forwards."""
    s, backend = scenario(seed), torch_backend()
    state = s.state()
    for batch, table in history(s, steps=3):
        state.require_capacity(batch)
        for op in ("check", "fingerprint", "record"):
            getattr(backend, op)(state, batch, table)
    assert (state.records[:, POSITION] != 0).any()
    return state


def sent(buffers: RecordBuffers, inbox: RecordBuffers, slots: torch.Tensor) -> None:
    """A transfer engine copies rows of three tables and knows nothing of what they are."""
    for name in ("stamps", "records", "fingerprints"):
        getattr(inbox, name)[slots] = getattr(buffers, name)[slots]


def test_what_arrives_is_what_was_exported():
    """Rows that travelled in buffers are a payload of their slots, as far as these have bytes."""
    state = recorded()
    buffers, inbox = RecordBuffers.of(state), RecordBuffers.inbox(state)
    slots = torch.tensor([2, 9, 5, 1])
    sent(buffers, inbox, slots)
    payload, exported = inbox.payload(slots), export_records(state, slots)
    there = exported != 0
    assert torch.equal(payload[there], exported[there])
    assert (
        inbox.size_bytes
        == buffers.size_bytes
        == sum(t.nbytes for t in (inbox.stamps, state.records)) + (state.fingerprints.nbytes)
    )


def test_own_tables_go_on_changing():
    """Nothing is copied until a page leaves."""
    state = recorded()
    buffers = RecordBuffers.of(state)
    state.records[4, TOKEN] = 77
    assert buffers.layout.read(buffers.payload(torch.tensor([4]))).tokens.tolist() == [77]


def test_a_transfer_that_was_cut_short_shows():
    """Slots whose rows did not come, while others' did, hold nothing that was written. If none came, nothing is known
    of any."""
    state = recorded()
    buffers, inbox = RecordBuffers.of(state), RecordBuffers.inbox(state)
    slots = torch.tensor([2, -1, 9])
    assert not inbox.payload(slots).any()
    sent(buffers, inbox, slots[:1])
    read = inbox.layout.read(inbox.payload(slots))
    assert read.known.tolist() == [True, False, True]
    assert not read.written[2]
    inbox.clear(slots[:1])
    assert not inbox.layout.read(inbox.payload(slots)).known.any()


def test_a_payload_is_read_as_plain_values():
    """Token and position of what was written, freed since or not; other rows say nothing, or that nothing is there."""
    state = recorded()
    state.records[:4] = 0
    state.records[:4, TOKEN] = torch.tensor([11, 12, 13, 14], dtype=torch.int32)
    words = [5 * STATES + State.WRITTEN, 6 * STATES + State.WRITTEN + State.FREED, 7 * STATES + State.UNKNOWN, 0]
    state.records[:4, POSITION] = torch.tensor(words, dtype=torch.int32)
    layout = PayloadLayout.of(state)
    read = layout.read(export_records(state, torch.tensor([0, 1, 2, 3, -1])))
    assert read.known.tolist() == [True] * 4 + [False]
    assert read.written.tolist() == [True, True, False, False, False]
    assert (read.tokens[:2].tolist(), read.positions[:2].tolist()) == ([11, 12], [5, 6])
    assert (read.tokens.dtype, read.positions.dtype) == (torch.int64, torch.int64)
