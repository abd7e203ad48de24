"""Histories: the last things that happened to each slot, noted by the kernels that make them happen; the same bits from
both back ends."""

import random
from collections import defaultdict

import pytest
import torch
from ops.scenario import differences, twin

from canary_core import CanaryConfig, KVSource, Region
from canary_core.ops import contents
from canary_core.ops.backends import Backend, torch_backend, triton_backend
from canary_core.ops.histories import Happening, life, read
from canary_core.ops.state import HISTORY_FREE_BYTES, RegionState, Shared
from canary_core.records import HISTORY, Clock, Happened, State

SLOTS = 24
BACKENDS = {"torch": torch_backend, "triton": triton_backend}
EVENTS = ("alloc", "share", "park", "evict", "free")
WRITERS = 3


def state_of(slots: int = SLOTS, device: str = "cpu") -> RegionState:
    """A region whose first slot is the null slot."""
    pool = torch.zeros(slots, 16, dtype=torch.uint8, device=device)
    region = Region("full", slots, (KVSource(pool, "k", 0, 16, 16),), null_slot=0)
    config = CanaryConfig(ring_rows=4096)
    return RegionState(region, 0, Shared.allocate(config, torch.device(device)), config)


def listed(*slots: int, device: str = "cpu") -> torch.Tensor:
    """As an engine gives them."""
    return torch.tensor(slots, dtype=torch.int64, device=device)


def lives(state: RegionState) -> list[list[tuple[int, str, int]]]:
    """Of each slot what is noted, oldest first."""
    now = int(state.shared.clock[Clock.NEXT])
    return [[(h.step, h.event, h.who) for h in read(row, now)] for row in state.histories.tolist()]


class Oracle:
    """The same in plain Python: a list for each slot, cut to the last few."""

    def __init__(self) -> None:
        self.lives: defaultdict[int, list[tuple[int, str, int]]] = defaultdict(list)

    def push(self, slot: int, step: int, event: str, who: int) -> None:
        """One thing happened to one slot."""
        told = self.lives[slot]
        if told and told[-1][1] == event and (told[-1][2] == who or event == "share"):
            told.pop()
        told.append((step, event, who))
        del told[:-HISTORY]


def traffic(backend: Backend, state: RegionState, rng: random.Random, steps: int) -> Oracle:
    """Random events of pages and slots, some of them listed twice, over some steps; what should be noted of them."""
    oracle, device = Oracle(), state.records.device.type
    for step in range(steps):
        state.shared.clock.fill_(step)
        for _ in range(3):
            page_slots, who = rng.choice([1, 1, 4]), rng.randint(-1, WRITERS)
            numbers = [rng.randrange(-1, SLOTS // page_slots + 2) for _ in range(rng.choice([1, 7]))]
            event = rng.choice([*EVENTS, "note"])
            if event == "note":
                page_slots, event = 1, rng.choice(["copy", "arrive", "forget", "clear"])
                backend.note(state, listed(*numbers, device=device), Happened[event.upper()], who)
            else:
                getattr(backend, event)(state, listed(*numbers, device=device), who, page_slots)
            for page in dict.fromkeys(numbers):
                # A page is judged by its first slot, and the null slot is nobody's.
                if 0 < page * page_slots < SLOTS:
                    for slot in range(page * page_slots, min((page + 1) * page_slots, SLOTS)):
                        oracle.push(slot, step, event, who)
    return oracle


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_things_are_noted(backend, seed):
    """Of any sequence of events: the last four of each slot, newest first; what the same request does again takes the
    place of the last, and so does another share after a share. A slot that is listed twice is noted once."""
    state = state_of()
    oracle = traffic(BACKENDS[backend](), state, random.Random(seed), steps=6 if backend == "triton" else 40)
    assert lives(state)[:-1] == [oracle.lives[slot] for slot in range(SLOTS)]


def test_a_slot_twice_in_one_call_is_noted_once():
    """By both back ends, pages too, and whether the event applies or not: a double free is in the history."""
    for backend in BACKENDS.values():
        state = state_of()
        ops = backend()
        ops.alloc(state, listed(2, 2, 1), 7, 4)
        state.shared.clock.fill_(3)
        ops.free(state, listed(9, 9), 7, 1)
        state.shared.clock.fill_(4)
        ops.free(state, listed(9), 8, 1)
        assert lives(state)[9] == [(0, "alloc", 7), (3, "free", 7), (4, "free", 8)]
        assert lives(state)[8] == lives(state)[4] == [(0, "alloc", 7)]
        assert lives(state)[12] == []


def test_numbers_are_kept_to_30_bits():
    """Steps beyond that are told rightly, since the step of now is known; nobody stays nobody."""
    state = state_of()
    now = (1 << 33) + 5
    state.shared.clock.fill_(now)
    torch_backend().alloc(state, listed(3), -1, 1)
    torch_backend().share(state, listed(3), (1 << 30) - 2, 1)
    state.shared.clock.fill_(now + 10)
    assert lives(state)[3] == [(now, "alloc", -1), (now, "share", (1 << 30) - 2)]


def test_what_happens_to_all_slots_is_one_entry():
    """However many there are; read, it comes where it belongs."""
    state = state_of()
    ops = torch_backend()
    ops.alloc(state, listed(3), 1, 1)
    state.shared.clock.fill_(5)
    ops.free(state, listed(3), 1, 1)
    before = state.histories[:-1].clone()
    contents.mark_all(state, State.UNWRITTEN)
    assert torch.equal(state.histories[:-1], before)
    ops.alloc(state, listed(3), 2, 1)
    state.shared.clock.fill_(9)
    own, every = (read(state.histories[row].tolist(), 9, row < 0) for row in (3, -1))
    assert [(h.step, h.event, h.every) for h in life(own, every)] == [
        (0, "alloc", False),
        (5, "free", False),
        (5, "clear", True),
        (5, "alloc", False),
    ]
    assert life([], every) == [Happening(5, "clear", -1, True)]


@pytest.mark.parametrize("kept", [True, False])
def test_many_tiny_slots_have_none(kept):
    """Where 32 bytes a slot are more than a hundredth of what the slot holds, and more than 16 MiB in all, nothing is
    noted and nothing fails, on either back end."""
    slots = HISTORY_FREE_BYTES // 32 - 1 if kept else HISTORY_FREE_BYTES // 32
    state = state_of(slots)
    assert (state.histories is not None) == kept
    for backend in BACKENDS.values():
        ops = backend()
        ops.alloc(state, listed(3, 4), 1, 1)
        ops.note(state, listed(3), Happened.COPY, listed(4))
        contents.mark_all(state, State.UNKNOWN)
    assert state.memory_bytes >= (32 * slots if kept else 0)


@pytest.mark.parametrize("seed", range(4))
def test_kernels_equal_reference_where_slots_repeat(seed):
    """Also on slots that are listed twice, with pages, which `test_equal` leaves out."""
    rng = random.Random(seed)
    state = state_of()
    for step in range(4):
        state.shared.clock.fill_(step)
        for event in EVENTS:
            other = twin(state)
            page_slots = rng.choice([1, 3])
            slots = listed(*(rng.randrange(-1, SLOTS // page_slots + 2) for _ in range(12)))
            getattr(torch_backend(), event)(state, slots, 1, page_slots)
            getattr(triton_backend(), event)(other, slots, 1, page_slots)
            assert "histories" not in differences(state, other, 0)
