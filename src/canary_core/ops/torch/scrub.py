"""scrub: the bytes of listed slots, against the recorded fingerprints; and the list of the next ones."""

import torch

from canary_core.ops.mapping import see
from canary_core.ops.state import RegionState
from canary_core.ops.torch.compare import compare
from canary_core.records import (
    COUNTERS,
    GAUGES,
    POSITION,
    SCRUB_GAUGES,
    SCRUB_WORDS,
    STATES,
    Counter,
    Cursor,
    Phase,
    Row,
    ScrubWord,
    State,
    Status,
)


def scrub(state: RegionState, probed: bool = False) -> None:
    """After `record`: compares the bytes of the listed slots (see `ScrubWord.LIST`), and lists slots for the next
    scrub. Reports BYTES. As in `read_check`, the record is asked only where bytes differ. ``probed``: the list's first
    slot also reports PROBE, see `Cursor.PROBE`."""
    device = state.records.device
    place = state.cursors[Cursor.SCRUB :][:SCRUB_WORDS].tolist()
    half, count = place[ScrubWord.LIST] >> 32, place[ScrubWord.LIST] & 0xFFFFFFFF
    slot = state.listed[half, :count].long()
    nobody = torch.full_like(slot, -1)
    seen = see(state, slot, torch.full_like(slot, Status.OK))
    probe = int(state.cursors[Cursor.PROBE]) - 1 if probed else -1
    compare(state, seen, Phase.SCRUB, {Row.POSITION: nobody, Row.WRITER: nobody}, probe)

    following = _list_next(state, place)
    passed = following[ScrubWord.RUNNING] - place[ScrubWord.RUNNING]
    state.shared.counters[Counter.SCRUBBED_SLOTS] += passed
    gauges = state.shared.counters[COUNTERS + state.index * GAUGES :][:SCRUB_GAUGES]
    gauges.copy_(torch.tensor(following[ScrubWord.RUNNING :][:SCRUB_GAUGES], device=device))
    state.cursors[Cursor.SCRUB_NEXT :][:SCRUB_WORDS] = torch.tensor(following, device=device)


def _list_next(state: RegionState, place: list[int]) -> list[int]:
    """Lists the next slots in the half not under comparison: running ones up to their share, then parked ones, then
    running ones again, up to ``SCRUB_SLOTS`` in all, or as many as a list holds. The search for each sort goes on from
    its last place, in physical order, no further than ``SCRUB_PASS`` and once round. Returns the `ScrubWord` values of
    the next scrub."""
    slots = state.region.slots
    most, share, passes = state.cursors[Cursor.SCRUB_SLOTS : Cursor.SCRUB_PASS + 1].clamp(max=slots).tolist()
    most = min(most, state.listed_slots)
    following, half = list(place), 1 - (place[ScrubWord.LIST] >> 32)
    listed = 0
    for turn, word in enumerate((ScrubWord.RUNNING, ScrubWord.PARKED, ScrubWord.RUNNING)):
        room = (min(share, most) if turn == 0 else most) - listed
        passed = following[word] - place[word]
        if room <= 0 or passed >= passes:
            continue
        o_slot = torch.arange(following[word], place[word] + passes, device=state.records.device) % slots
        sort = State.WRITTEN | State.PARKED if word is ScrubWord.PARKED else State.WRITTEN
        found = (state.records[o_slot, POSITION] & STATES - 1 - State.ARRIVED == sort).nonzero()[:room, 0]
        state.listed[half, listed : listed + len(found)] = o_slot[found].int()
        # All are passed, unless there is no room for the next one.
        following[word] = following[word] + int(found[-1]) + 1 if len(found) == room else place[word] + passes
        following[word + 1] += len(found)
        listed += len(found)
    following[ScrubWord.LIST] = (half << 32) + listed
    return following
