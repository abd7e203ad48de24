"""What the scrub lists: by an oracle that goes slot by slot, on both back ends."""

import random

import pytest
import torch
from ops.scenario import differences, list_slots, ring_rows, twin

from canary_core import CanaryConfig, KVSource, Region
from canary_core.ops import state as region_state
from canary_core.ops.backends import Backend, torch_backend, triton_backend
from canary_core.ops.state import RegionState, Shared
from canary_core.records import (
    COUNTERS,
    POSITION,
    PROBE,
    SCRUB_GAUGES,
    SCRUB_WORDS,
    STATES,
    Counter,
    Cursor,
    Kind,
    Row,
    ScrubWord,
    State,
)

BACKENDS = [
    pytest.param(torch_backend, "cpu", id="torch"),
    pytest.param(triton_backend, "cpu", id="triton"),
    pytest.param(triton_backend, "cuda", id="triton-cuda", marks=pytest.mark.gpu),
]
PARKED = State.WRITTEN | State.PARKED


def state_of(slots: int, device: str = "cpu") -> RegionState:
    """A region of two short sources, fingerprinted, with nothing written."""
    pools = [torch.randint(0, 256, (slots, 8), dtype=torch.uint8, device=device) for _ in "kv"]
    sources = tuple(KVSource(pool, half, 0, 8, 8) for pool, half in zip(pools, "kv", strict=True))
    config = CanaryConfig(ring_rows=64)
    state = RegionState(Region("r", slots, sources), 0, Shared.allocate(config, torch.device(device)), config)
    torch_backend().baseline(state)
    return state


def budget(state: RegionState, slots: int, running: int, passes: int) -> None:
    """What the host says."""
    for word, value in ((Cursor.SCRUB_SLOTS, slots), (Cursor.SCRUB_RUNNING, running), (Cursor.SCRUB_PASS, passes)):
        state.cursors[word] = value


def advance(state: RegionState) -> None:
    """What `check` does before the next scrub."""
    state.cursors[Cursor.SCRUB :][:SCRUB_WORDS] = state.cursors[Cursor.SCRUB_NEXT :][:SCRUB_WORDS]


def listed(state: RegionState) -> list[int]:
    """What the next scrub compares, after `advance`."""
    place = int(state.cursors[Cursor.SCRUB + ScrubWord.LIST])
    slots: list[int] = state.listed[place >> 32, : place & 0xFFFFFFFF].tolist()
    return slots


class Oracle:
    """One slot after the other."""

    def __init__(self, states: list[int]) -> None:
        self.states = states
        self.running = self.parked = 0

    def next(self, most: int, share: int, passes: int) -> list[int]:
        found: list[int] = []
        left = {State.WRITTEN: min(passes, len(self.states)), PARKED: min(passes, len(self.states))}
        for sort, room in ((State.WRITTEN, min(share, most)), (PARKED, most), (State.WRITTEN, most)):
            while left[sort] and len(found) < room:
                left[sort] -= 1
                place = self.parked if sort == PARKED else self.running
                if self.states[place] == sort:
                    found.append(place)
                place = (place + 1) % len(self.states)
                if sort == PARKED:
                    self.parked = place
                else:
                    self.running = place
        return found


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("seed", range(10))
def test_slots_are_listed_as_the_oracle_does(backend, device, seed, monkeypatch):
    """Running ones up to their share, then parked ones, then running ones again; in physical order from where each sort
    was left, over several tiles, round the pool's end, no further than one may pass, and no more than a list holds.
    Nothing else is listed."""
    rng = random.Random(seed)
    slots = rng.choice([5, 700, 3000])
    if seed >= 6:
        monkeypatch.setattr(region_state, "LEAST_LISTED", 2)
    state, scrub = state_of(slots, device), backend().scrub
    states = rng.choices(
        [0, State.WRITTEN, PARKED, State.WRITTEN | State.FREED, State.UNKNOWN, State.ALLOCATED], k=slots
    )
    if seed % 2:
        # In runs, as a pool is that was filled from its begin.
        states.sort(key=lambda s: s not in (State.WRITTEN, PARKED))
    state.records[:, POSITION] = torch.tensor([rng.randrange(1000) * STATES + s for s in states], dtype=torch.int32)
    oracle, passed = Oracle(states), 0
    for _ in range(8):
        most = rng.choice([0, 1, slots // 3, slots, 2 * slots])
        share, passes = (
            rng.choice([0, most // 2, most, 2 * slots]),
            rng.choice([slots, 2 * slots, rng.randint(0, slots)]),
        )
        budget(state, most, share, passes)
        scrub(state)
        advance(state)
        assert listed(state) == oracle.next(min(most, state.listed_slots), share, passes)
        place = state.cursors[Cursor.SCRUB :][:SCRUB_WORDS].tolist()
        assert place[ScrubWord.RUNNING] % slots == oracle.running
        assert place[ScrubWord.PARKED] % slots == oracle.parked
        # The host hears of it behind the counters.
        assert state.shared.counters[COUNTERS:][:SCRUB_GAUGES].tolist() == place[ScrubWord.RUNNING :][:SCRUB_GAUGES]
        passed = place[ScrubWord.RUNNING]
    assert int(state.shared.counters[Counter.SCRUBBED_SLOTS]) == passed
    assert ring_rows(state) == []


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_what_was_listed_is_judged_by_what_it_is_now(backend, device):
    """A slot that was given back, or is to be written, since it was listed may hold anything; one that was parked since
    may not."""
    state = state_of(40, device)
    state.records[:, POSITION] = int(State.WRITTEN)
    list_slots(state, range(40))
    for slot, now in ((3, State.WRITTEN | State.FREED), (4, State.ALLOCATED), (5, State.UNKNOWN), (6, PARKED)):
        state.records[slot, POSITION] = int(now)
        state.sources[0].tensor[slot, 2] ^= 8
    backend().scrub(state)
    (found,) = ring_rows(state)
    assert (found[Row.KIND - 1], found[Row.SLOT - 1]) == (Kind.BYTES, 6)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_a_scrub_without_a_check_before_it_loses_nothing(backend, device):
    """Only `check` lets a list go by: two scrubs in a row compare the same one and make the same next one."""
    state, scrub = state_of(40, device), backend().scrub
    state.records[:, POSITION] = int(State.WRITTEN)
    budget(state, 10, 10, 40)
    seen = []
    for _ in range(4):
        scrub(state)
        scrub(state)
        advance(state)
        seen += listed(state)
    assert seen == list(range(40))


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("source", [0, 1])
def test_a_probe_is_told_of_the_first_slot_that_is_listed(backend, device, source):
    """By a probed scrub, of the source that was asked for: with a fingerprint that is wrong by all its bits, and with
    what the bytes come to. Of the others in the list, whose bytes are right, nothing is told, nor by a usual scrub."""
    state, scrub = state_of(40, device), backend().scrub
    budget(state, 10, 10, 40)
    state.cursors[Cursor.PROBE] = source + 1
    scrub(state, True)
    assert ring_rows(state) == [], "there is nothing in the list"
    state.records[7:, POSITION] = int(State.WRITTEN)
    for probed in (False, True, False):
        scrub(state, probed)
        advance(state)
    (found,) = ring_rows(state)
    row = {word: found[word - 1] for word in Row if word is not Row.SEQUENCE}
    assert (row[Row.KIND], row[Row.SLOT], row[Row.SOURCE]) == (PROBE, 7, source)
    known = int(state.fingerprints[7, source])
    assert (row[Row.STORED_VALUE], row[Row.FOUND_VALUE]) == (~known, known)
    assert int(state.shared.counters[PROBE]) == 1
    assert int(state.shared.counters[Counter.CHECKED_BYTES]) == 3 * 10 * 16 - 10 * 16


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize(("flip", "now"), [(0, State.WRITTEN), (8, State.WRITTEN), (0, State.WRITTEN | State.FREED)])
def test_a_probe_hides_no_corruption_and_needs_no_record(backend, device, flip, now):
    """Where the bytes of the probed slot have changed, its row has what they come to now; and it comes even where the
    slot was given back since it was listed."""
    state = state_of(40, device)
    state.records[:, POSITION] = int(now)
    list_slots(state, [5, 6])
    state.cursors[Cursor.PROBE] = 1
    known = int(state.fingerprints[5, 0])
    state.sources[0].tensor[5, 2] ^= flip
    backend().scrub(state, True)
    (row,) = ring_rows(state)
    assert (row[Row.KIND - 1], row[Row.SLOT - 1], row[Row.STORED_VALUE - 1]) == (PROBE, 5, ~known)
    assert (row[Row.FOUND_VALUE - 1] != known) == bool(flip)


@pytest.mark.parametrize("seed", range(4))
def test_kernel_equals_reference_over_many_slots(seed):
    """The same bits, the unused rest of the list included, where a list has more than one tile."""
    rng = random.Random(seed)
    state = state_of(2500)
    state.records[:, POSITION] = torch.tensor(rng.choices([0, 1, 1, 9], k=2500), dtype=torch.int32)
    budget(state, 900, 600, rng.choice([2500, 1700]))
    kernels: Backend = triton_backend()
    for _ in range(3):
        other = twin(state)
        torch_backend().scrub(state)
        kernels.scrub(other)
        assert differences(state, other, 0) == []
        advance(state)
