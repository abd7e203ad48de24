"""`SlotEvents`: who has a slot, in pages and in batches of events; slots whose bytes came from elsewhere, or hold
nothing any more."""

import pytest
import torch
from support.guarded import Guarded
from support.toy import Request, ToyEngine

from canary_core import Kind, MisuseError, State
from canary_core.records import FREED_BY, POSITION, STATES, STEP_WRITTEN, Phase


def records(guarded: Guarded) -> torch.Tensor:
    """What is known of each slot."""
    return guarded.canary.states["full"].records


def served(**settings: object) -> Guarded:
    """An engine that has served one request of 3 tokens, in slots 1 to 3."""
    guarded = Guarded(**settings)
    guarded.submit()
    guarded.step()
    return guarded


def padded_with_a_block() -> ToyEngine:
    """An engine whose first four slots are padding."""
    engine = ToyEngine()
    engine.null_slots, engine.free = 4, list(range(4, 64))
    return engine


def compute_again(guarded: Guarded, request: Request) -> None:
    """The next forward writes the request's slots once more."""
    guarded.engine.free[:0] = request.slots
    request.slots, request.cached = [], 0


def test_a_read_of_a_freed_slot_names_reader_writer_and_freer(guarded):
    """Freed under a running request by another one: all three are in the finding, and the step of the free."""
    reader = guarded.submit("reader")
    guarded.decode()
    slots = torch.tensor(reader.slots[:1])
    guarded.canary.slots.free("full", slots, guarded.engine.writers.id("thief"))
    guarded.decode()
    (found,) = guarded.violations
    assert found.kind is Kind.FREED
    assert (found.request, found.stored_request, found.freed_by) == ("reader", "reader", "thief")
    assert (found.step_freed, found.step) == (1, 2)


def test_a_double_free_names_both_that_freed(guarded):
    """The second one is the finding's request; the slot stays the first one's."""
    writers = guarded.engine.writers
    guarded.submit("a")
    guarded.decode()
    guarded.canary.slots.alloc("full", torch.tensor([9]))
    guarded.canary.slots.free("full", torch.tensor([9]), writers.id("first"))
    guarded.canary.slots.free("full", torch.tensor([9]), writers.id("second"))
    guarded.canary.drain()
    (found,) = guarded.violations
    assert (found.kind, found.slot) == (Kind.DOUBLE_FREE, 9)
    assert (found.request, found.freed_by) == ("second", "first")
    assert records(guarded)[9, FREED_BY] == writers.id("first")


def test_each_slot_of_an_event_has_its_own_writer(guarded):
    """A writer may be a function that gives one number for each slot, asked when the event takes effect."""
    writers = guarded.engine.writers
    owner = guarded.submit("owner")
    guarded.decode()
    held = torch.tensor(owner.slots[:2])
    ids = torch.tensor([writers.id("one"), writers.id("two")], dtype=torch.int32)
    guarded.canary.slots.alloc("full", held, lambda: ids)
    guarded.canary.drain()
    assert [(v.kind, v.slot, v.request, v.stored_request) for v in guarded.violations] == [
        (Kind.DOUBLE_ALLOC, int(held[0]), "one", "owner"),
        (Kind.DOUBLE_ALLOC, int(held[1]), "two", "owner"),
    ]


def test_pages_share_one_fate(guarded):
    """A page is freed and handed out whole; what is wrong with it is one finding, at its first slot."""
    for _ in range(2):
        guarded.canary.slots.alloc("full", torch.tensor([2, 3]), page_slots=4)
        guarded.canary.slots.free("full", torch.tensor([2, 3]), page_slots=4)
    guarded.canary.slots.free("full", torch.tensor([3]), page_slots=4)
    guarded.canary.drain()
    assert [(v.kind, v.slot) for v in guarded.violations] == [(Kind.DOUBLE_FREE, 12)]
    states = records(guarded)[:, POSITION] % STATES
    assert states[8:16].tolist() == [State.FREED | State.ALLOCATED] * 8
    assert not states[:8].any()
    assert not states[16:].any()


def test_events_between_two_forwards_keep_their_order(guarded):
    """However many there are and whatever is put together: free, hand out and free again is no finding."""
    for slot in range(1, 6):
        guarded.canary.slots.alloc("full", torch.tensor([slot]))
    for slot in range(1, 6):
        guarded.canary.slots.free("full", torch.tensor([slot]))
    guarded.canary.slots.alloc("full", torch.tensor([2, 3]))
    guarded.canary.slots.free("full", torch.tensor([3]))
    guarded.canary.drain()
    assert guarded.violations == []
    states = records(guarded)[:6, POSITION] % STATES
    freed = State.FREED | State.ALLOCATED
    assert states.tolist() == [0, freed, State.ALLOCATED, freed, freed, freed]


def test_events_told_at_once_are_those_told_one_by_one():
    """Same findings, records, counts and journal; those of the same sort and owner in a row are one op, as before."""
    one_by_one, at_once = Guarded(ToyEngine(window=4)), Guarded(ToyEngine(window=4))
    pages = torch.tensor([2, 3, 3, 3, 5, 5])
    parts = dict(zip(("alloc", "free", "share", "park"), pages.split([2, 1, 1, 2]), strict=True))
    told = [
        ((event, region, 4), numbers, (lambda: torch.tensor([7, 8], dtype=torch.int32)) if event == "park" else 1)
        for event, numbers in (*parts.items(), ("free", pages[1:3]), ("free", pages[:0]))
        for region in ("full", "window")
    ]
    for (event, region, page_slots), slots, writer in told:
        getattr(one_by_one.canary.slots, event)(region, slots, writer, page_slots=page_slots)
    at_once.canary.slots.report(told)
    at_once.canary.slots.report([])
    for guarded in (one_by_one, at_once):
        guarded.canary.drain()
    first, second = ([(v.kind, v.region, v.slot, v.request) for v in g.violations] for g in (one_by_one, at_once))
    assert first == second
    assert {kind for kind, *_ in first} == {Kind.DOUBLE_FREE, Kind.FREED}
    for region in ("full", "window"):
        assert torch.equal(*(g.canary.states[region].records for g in (one_by_one, at_once)))
        noted = [
            [(e.event, e.count, e.writer, e.page_slots, e.sure, e.slots.tolist()) for e in g.canary.journal.of(region)]
            for g in (one_by_one, at_once)
        ]
        assert noted[0] == noted[1]
    assert one_by_one.canary.slots.counts == at_once.canary.slots.counts


def test_events_told_at_once_of_what_are_no_slots_are_refused(guarded):
    """None of them takes effect, and the first is told; one of a region that is not guarded leaves the others alone."""
    slots = guarded.canary.slots
    slots.report([(("free", "full", 1), [1, 2], -1), (("free", "full", 1), torch.tensor([3]), -1)])
    assert [event.fields["reason"][:19] for event in guarded.findings.told("misuse")] == ["slots.free: slots m"]
    assert slots.counts == {"full": {}}
    one = torch.tensor([1])
    slots.report([(("alloc", "full", 1), one, -1), (("alloc", "mamba", 1), one, -1), (("free", "full", 1), one, -1)])
    assert len(guarded.findings.told("misuse")) == 2
    assert slots.counts == {"full": {"alloc": 1, "free": 1}}


@pytest.mark.parametrize("next_event", ["alloc", "clear", "settle"])
def test_events_that_are_told_later_keep_their_place(guarded, next_event):
    """What was freed one by one and is told as one event counts as freed before what comes next, and is told once."""
    canary, freed, told = guarded.canary, [], []

    def tell() -> None:
        told.append(list(freed))
        canary.slots.free("full", torch.tensor(freed))

    canary.slots.alloc("full", torch.tensor([1, 2, 3]))
    for slot in (1, 2):
        freed.append(slot)
        canary.slots.defer(tell)
    assert told == []
    if next_event == "alloc":
        canary.slots.alloc("full", torch.tensor([2]))
    elif next_event == "clear":
        canary.slots.clear("full", torch.tensor([2]))
    canary.slots.settle()
    canary.drain()
    assert told == [[1, 2]]
    assert guarded.violations == []
    expected = {"alloc": State.ALLOCATED, "clear": State.UNWRITTEN, "settle": State.FREED | State.ALLOCATED}
    states = records(guarded)[:4, POSITION] % STATES
    assert states.tolist() == [0, State.FREED | State.ALLOCATED, expected[next_event], State.ALLOCATED]


EVENTS = ("alloc", "park", "share", "evict", "free")
F, P = State.FREED, State.PARKED
HELD = (State.ALLOCATED, State.WRITTEN)
NOT_JUDGED = (State.UNWRITTEN, State.UNKNOWN)


def after(event: str, state: int) -> tuple[int, Kind | None]:
    """What ``event`` makes of a slot in ``state``, and what is found: the table of docs/how-it-works.md, by hand."""
    content, free, parked = state % 4, bool(state & F), bool(state & P)
    if event == "alloc":
        return State.ALLOCATED, Kind.DOUBLE_ALLOC if not free and (parked or content in HELD) else None
    if event == "share":
        return (state, Kind.FREED) if free else (content, None)
    if event == "park":
        return (state, Kind.DOUBLE_FREE) if free else (content | P, Kind.DOUBLE_FREE if parked else None)
    if free:
        return state, Kind.DOUBLE_FREE
    if event == "free":
        return content | F, Kind.DOUBLE_FREE if parked else None
    return content | F, Kind.EVICTED_IN_USE if content in HELD and not parked else None


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", [content | mark for content in (*HELD, *NOT_JUDGED) for mark in (0, F, P)])
def test_each_event_in_each_state(guarded, event, state):
    """What becomes of the slot and what is found, for every state that a slot can be in."""
    records(guarded)[9, POSITION] = int(state)
    getattr(guarded.canary.slots, event)("full", torch.tensor([9]))
    guarded.canary.drain()
    left, kind = after(event, int(state))
    assert records(guarded)[9, POSITION] == left
    assert [(v.kind, v.slot, v.phase) for v in guarded.violations] == ([] if kind is None else [(kind, 9, Phase.EVENT)])


@pytest.mark.parametrize(
    ("event", "states", "found"),
    [
        ("alloc", [State.ALLOCATED], [Kind.DOUBLE_ALLOC]),
        ("park", [P | State.WRITTEN], [Kind.DOUBLE_FREE]),
        ("share", [State.WRITTEN], []),
        ("evict", [F | State.WRITTEN], [Kind.EVICTED_IN_USE, Kind.DOUBLE_FREE]),
        ("free", [F | State.WRITTEN], [Kind.DOUBLE_FREE]),
    ],
)
def test_a_slot_listed_twice_in_one_call(event, states, found):
    """The second is judged by what the first made of it; to share a prefix with two requests at once is no mistake."""
    guarded = served()
    if event == "alloc":
        guarded.canary.slots.free("full", torch.tensor([2]))
    getattr(guarded.canary.slots, event)("full", torch.tensor([2, 2]))
    guarded.canary.drain()
    assert sorted(v.kind for v in guarded.violations) == sorted(found)
    assert (records(guarded)[[2], POSITION] % STATES).tolist() == states


def test_a_prefix_is_parked_shared_parked_and_evicted(guarded):
    """The whole life of a cached prefix, over forwards that read it: nothing is found."""
    first = guarded.submit("first")
    slots, canary = torch.tensor([1, 2, 3]), guarded.canary
    canary.slots.alloc("full", slots, guarded.engine.writers.id("first"))
    guarded.step()
    assert first.slots == slots.tolist()
    guarded.engine.requests.clear()
    canary.slots.park("full", slots, guarded.engine.writers.id("first"))
    for name in ("second", "third"):
        guarded.engine.submit(name, first.tokens[:3], shared=first, prefix=3)
        canary.slots.share("full", slots[:2], guarded.engine.writers.id(name))
        canary.slots.share("full", slots[2:])
        guarded.decode()
        guarded.engine.requests.clear()
        canary.slots.park("full", slots, guarded.engine.writers.id(name))
    canary.slots.evict("full", slots)
    canary.slots.alloc("full", slots)
    canary.drain()
    assert guarded.violations == []
    assert canary.stats()["checked_slots"] == 6


def test_a_parked_slot_may_be_read():
    """By a forward, by the scrub, by a check on demand and by a transfer; a flipped byte in it is still found."""
    guarded = served(read_check=-1, scrub_budget="1MiB")
    canary = guarded.canary
    canary.slots.park("full", torch.tensor([1, 2, 3]))
    guarded.decode()
    canary.slots.check("full", torch.tensor([1, 2, 3]))
    layout = canary.slots.payload_layout("full")
    sent = layout.read(canary.slots.export_records("full", torch.tensor([1, 2, 3])))
    assert sent.written.all()
    assert sent.positions.tolist() == [0, 1, 2]
    assert canary.slots.still_holds("full", 2, step=1)
    canary.drain()
    assert guarded.violations == []
    guarded.engine.k[1][2] += 1
    guarded.decode()
    assert {(v.kind, v.slot, v.layer) for v in guarded.violations} == {(Kind.BYTES, 2, 1)}


def test_a_double_release_of_a_parked_slot_names_both(guarded):
    """Whether the engine parks it once more or gives it to the allocator. The slot is in the free list then, so the
    next hit on it is found, too."""
    request = guarded.submit("writer")
    guarded.decode()
    slots, writers = guarded.canary.slots, guarded.engine.writers
    held = torch.tensor(request.slots[:2])
    slots.park("full", held, writers.id("first"))
    slots.park("full", held[:1], writers.id("second"))
    slots.free("full", held[1:], writers.id("third"))
    slots.share("full", held, writers.id("reader"))
    guarded.canary.drain()
    assert [(v.kind, v.slot, v.request, v.freed_by, v.stored_state) for v in guarded.violations] == [
        (Kind.DOUBLE_FREE, int(held[0]), "second", "first", State.PARKED),
        (Kind.DOUBLE_FREE, int(held[1]), "third", "first", State.PARKED),
        (Kind.FREED, int(held[1]), "reader", "third", State.FREED),
    ]


def test_a_parked_slot_that_is_handed_out_was_not_evicted(guarded):
    """The finding says who gets it, and who wrote what the cache still keeps."""
    request = guarded.submit("writer")
    guarded.decode()
    slot = torch.tensor(request.slots[:1])
    guarded.canary.slots.park("full", slot)
    guarded.canary.slots.alloc("full", slot, guarded.engine.writers.id("next"))
    guarded.canary.drain()
    (found,) = guarded.violations
    assert (found.kind, found.stored_state) == (Kind.DOUBLE_ALLOC, State.PARKED)
    assert (found.request, found.stored_request) == ("next", "writer")


def test_an_evicted_slot_that_a_request_reads_is_found_twice(guarded):
    """When it is evicted, although the request took it, and when the request reads it."""
    request = guarded.submit("writer")
    guarded.decode()
    slots, slot = guarded.canary.slots, torch.tensor(request.slots[:1])
    slots.park("full", slot)
    slots.share("full", slot, guarded.engine.writers.id("writer"))
    slots.evict("full", slot)
    guarded.decode()
    assert [(v.kind, v.slot) for v in guarded.violations] == [
        (Kind.EVICTED_IN_USE, int(slot)),
        (Kind.FREED, int(slot)),
    ]


@pytest.mark.parametrize("release", ["park", "free"])
def test_a_preempted_request_comes_back(guarded, release):
    """Preemption lets go of slots as the end of a request does: parked and shared again, or freed and computed again.
    Neither is a finding."""
    request = guarded.submit("a")
    canary, slots = guarded.canary, torch.tensor([1, 2, 3])
    canary.slots.alloc("full", slots)
    guarded.step()
    getattr(canary.slots, release)("full", slots)
    if release == "park":
        canary.slots.share("full", slots)
    else:
        canary.slots.alloc("full", slots)
        compute_again(guarded, request)
    guarded.decode()
    guarded.decode()
    assert guarded.violations == []
    assert not (records(guarded)[slots, POSITION] & (F | P)).any()


def test_a_forward_that_writes_a_parked_slot_makes_it_held(guarded):
    """Then it may be parked again, which is no second release."""
    request = guarded.submit("a")
    guarded.step()
    slots = torch.tensor(request.slots)
    guarded.canary.slots.park("full", slots)
    compute_again(guarded, request)
    guarded.step()
    assert (records(guarded)[slots, POSITION] % STATES).tolist() == [State.WRITTEN] * len(slots)
    assert not records(guarded)[slots, FREED_BY].any()
    guarded.canary.slots.park("full", slots)
    guarded.canary.drain()
    assert guarded.violations == []


def test_pages_are_parked_shared_and_evicted_whole(guarded):
    """All slots of a page share one fate, and the region's last page may be cut short."""
    slots, pages = guarded.canary.slots, torch.tensor([2, 12])
    size = 5
    slots.alloc("full", pages, page_slots=size)
    for event, mark in (("park", P), ("share", 0), ("park", P), ("evict", F)):
        getattr(slots, event)("full", pages, page_slots=size)
        slots.settle()
        states = records(guarded)[:, POSITION] % STATES
        assert states[10:15].tolist() == [State.ALLOCATED | mark] * size
        assert states[60:].tolist() == [State.ALLOCATED | mark] * 4
        assert not states[:10].any()
        assert not states[15:60].any()
    slots.evict("full", torch.tensor([2]), page_slots=size)
    guarded.canary.drain()
    assert [(v.kind, v.slot) for v in guarded.violations] == [(Kind.DOUBLE_FREE, 10)]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("event", EVENTS)
def test_a_null_block_is_nobodys(event, backend):
    """Whatever is told of a slot or a page of it is a finding, and changes nothing."""
    guarded = Guarded(padded_with_a_block(), backend=backend)
    getattr(guarded.canary.slots, event)("full", torch.tensor([0, 3, 4]))
    getattr(guarded.canary.slots, event)("full", torch.tensor([1, 3]), page_slots=2)
    guarded.canary.drain()
    assert [(v.kind, v.slot) for v in guarded.violations] == [(Kind.NULL_SLOT, slot) for slot in (0, 3, 2)]
    assert not records(guarded)[:4].any()


def test_a_token_in_a_null_block_is_found():
    """Written to one of its slots, and read there."""
    guarded = Guarded(padded_with_a_block())
    request = guarded.submit("a")
    guarded.decode()
    guarded.engine.free.insert(0, 3)
    guarded.decode()
    assert [(v.kind, v.slot, v.phase) for v in guarded.violations] == [(Kind.NULL_SLOT, 3, Phase.POST_FORWARD)]
    guarded.decode()
    # The same place and kind again, so it is counted and not told twice.
    assert request.slots.count(3) == 1
    assert guarded.canary.stats()["repeated"] == 1


def test_records_that_arrive_leave_a_parked_slot_parked(guarded):
    """What a slot holds and who has it are told by different events."""
    request = guarded.submit("a")
    guarded.decode()
    source, parked = torch.tensor(request.slots[:1]), torch.tensor([20])
    guarded.canary.slots.park("full", parked)
    guarded.canary.slots.copy("full", source, parked)
    guarded.canary.drain()
    assert records(guarded)[20, POSITION] % STATES == P | State.WRITTEN | State.ARRIVED
    assert guarded.violations == []


def copied(guarded: Guarded, halves: str, check: bool) -> torch.Tensor:
    """Slots 1 to 3 of a request are copied to 20 to 22, in a layer 1 only those of ``halves``; gives where to."""
    engine, source, destination = guarded.engine, torch.tensor([1, 2, 3]), torch.tensor([20, 21, 22])
    for layer, pair in enumerate(zip(engine.k, engine.v, strict=True)):
        for half, tensor in zip("kv", pair, strict=True):
            if layer == 0 or half in halves:
                tensor[destination] = tensor[source]
    guarded.canary.slots.copy("full", source, destination, check=check)
    return destination


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("halves", ["kv", "k", ""])
def test_a_copy_is_judged_against_its_source(halves, check):
    """K alone is copied, or nothing, in one layer: that layer and half of each slot is found, at once where the copy is
    checked, else when somebody reads or compares it. What lies there is never taken for right. A whole copy is fine."""
    guarded = served()
    destination = copied(guarded, halves, check)
    if not check:
        guarded.canary.drain()
        assert guarded.violations == []
        guarded.canary.slots.check("full", destination)
    guarded.canary.drain()
    missing = {(slot, f"{half}.1") for slot in (20, 21, 22) for half in "kv" if half not in halves}
    assert {(v.slot, v.source) for v in guarded.violations} == missing
    for found in guarded.violations:
        assert (found.kind, found.phase, found.stored_request) == (Kind.BYTES, Phase.EVENT, "a")
        assert found.explanation.startswith(f"the bytes that were copied or loaded to slot {found.slot} (page")


def test_a_copy_that_has_to_wait_is_left_to_the_scrub():
    """Events of the allocator still wait for the next forward, so the copy does, too: nothing is compared before."""
    guarded = served()
    guarded.canary.slots.alloc("full", torch.tensor([20, 21, 22]))
    copied(guarded, "k", check=True)
    guarded.canary.slots.settle()
    guarded.canary.drain()
    assert guarded.violations == []
    guarded.canary.slots.check("full", torch.tensor([20, 21, 22]))
    guarded.canary.drain()
    assert {v.source for v in guarded.violations} == {"v.1"}


def test_an_allocator_that_is_followed_no_longer_frees_nothing(guarded):
    """After `end_lifetime` a slot that was freed or parked is what it was before."""
    request = guarded.submit("a")
    guarded.decode()
    guarded.canary.slots.free("full", torch.tensor(request.slots[1:]))
    guarded.canary.slots.park("full", torch.tensor(request.slots[:1]))
    guarded.canary.slots.end_lifetime("full")
    guarded.decode()
    assert guarded.violations == []
    assert not (records(guarded)[:, POSITION] & (F | P)).any()


def test_a_forgotten_slot_is_not_judged_by_what_it_held_at_attach():
    """A pool that already held the very bytes that are written next raises no lost write once they were forgotten."""
    first = ToyEngine()
    first.submit("a", [5, 6, 7])
    batch = first.batch()
    first.forward(batch)
    again = ToyEngine()
    for layer in range(len(again.k)):
        again.k[layer].copy_(first.k[layer])
        again.v[layer].copy_(first.v[layer])
    canary = Guarded(again, read_check=-1).canary
    canary.slots.forget("full", torch.arange(1, 64))
    canary.slots.clear("full", torch.arange(1, 64))
    again.submit("a", [5, 6, 7])
    again.step(canary)
    canary.drain()
    assert canary.stats()["violations"] == 0
    assert canary.stats()["recorded_slots"] == 3


@pytest.mark.parametrize(("event", "left"), [("forget", State.UNKNOWN), ("clear", State.UNWRITTEN)])
def test_all_slots_of_a_region_need_no_list(event, left):
    """None says of every slot what a list of all of them says: written, handed out, freed, and never touched ones."""
    records = []
    for listed in (True, False):
        guarded = served(scrub_budget="0")
        canary = guarded.canary
        canary.slots.alloc("full", torch.tensor([8, 9]))
        canary.slots.free("full", torch.tensor([2, 9]))
        state = canary.states["full"]
        getattr(canary.slots, event)("full", torch.arange(state.region.slots) if listed else None)
        canary.drain()
        records.append((state.records.clone(), state.fingerprints.clone()))
    for by_list, at_once in zip(*records, strict=True):
        assert torch.equal(by_list, at_once)
    assert (records[1][0][:, POSITION] % STATES).unique().tolist() == [left]


def test_expected_slots_are_not_judged_while_events_wait():
    """Slots whose bytes will arrive from elsewhere are left alone at once, even before the events that wait; a slot
    that was freed stays so."""
    guarded = served(read_check=-1, scrub_budget="1MiB")
    canary = guarded.canary
    states = canary.states["full"].records[:, POSITION] % STATES
    assert states[1:4].tolist() == [State.WRITTEN] * 3
    canary.slots.free("full", torch.tensor([1]))
    canary.slots.check("full", torch.tensor([1, 2, 3]))
    canary.drain()
    canary.slots.free("full", torch.tensor([2]))
    canary.slots.expect("full", torch.tensor([1, 2, 99]))
    states = canary.states["full"].records[:, POSITION] % STATES
    assert states[1:4].tolist() == [State.UNKNOWN | State.FREED, State.UNKNOWN, State.WRITTEN]
    for layer in guarded.engine.k:
        layer[1:3] += 1
    canary.slots.check("full", torch.tensor([1, 2, 3, -1, 99]))
    canary.drain()
    assert canary.stats()["violations"] == 0


def test_slots_that_hold_nothing_may_be_expected():
    """Bytes are announced for slots that the allocator has just handed out, and for ones that nobody ever had, before
    the allocator's own events take effect: those find the slots as they were, and what arrives is not judged."""
    canary = Guarded(scrub_budget="0").canary
    records = canary.states["full"].records
    canary.slots.alloc("full", torch.tensor([1]))
    canary.slots.settle()
    canary.slots.alloc("full", torch.tensor([2, 3]))
    canary.slots.expect("full", torch.tensor([1, 2]))
    assert (records[1:4, POSITION] % STATES).tolist() == [State.ALLOCATED, State.UNWRITTEN, State.UNWRITTEN]
    canary.slots.forget("full", torch.tensor([1, 2]))
    canary.drain()
    assert (records[1:4, POSITION] % STATES).tolist() == [State.UNKNOWN, State.UNKNOWN, State.ALLOCATED]
    assert canary.stats()["violations"] == 0


def test_slots_are_checked_on_demand():
    """`SlotEvents.check` finds the layer and half of a changed slot at once, and looks at no other."""
    guarded = served(scrub_budget="0")
    engine = guarded.engine
    engine.v[1].view(-1)[engine.v[1][0].numel() * 2] += 1
    engine.k[0].view(-1)[engine.k[0][0].numel() * 3] += 1
    guarded.canary.slots.check("full", torch.tensor([1, 2]))
    guarded.canary.drain()
    found = [(v.kind, v.slot, v.layer, v.half, v.phase) for v in guarded.violations]
    assert found == [(Kind.BYTES, 2, 1, "v", Phase.EVENT)]


def test_pages_are_checked_on_demand():
    """Of a prefix hit, by the numbers of its blocks: the same slots, and no others. The region ends within a page."""
    guarded = served(scrub_budget="0")
    engine, slots = guarded.engine, guarded.canary.regions["full"].slots
    for slot in (2, 5):
        engine.v[1].view(-1)[engine.v[1][0].numel() * slot] += 1
    guarded.canary.slots.check("full", torch.tensor([0, -1, slots // 4, slots]), page_slots=4)
    guarded.canary.drain()
    assert [(v.kind, v.slot, v.phase) for v in guarded.violations] == [(Kind.BYTES, 2, Phase.EVENT)]
    guarded.canary.slots.check("full", torch.tensor([1]), page_slots=0)
    assert len(guarded.findings.told("misuse")) == 1


def test_forgotten_bytes_leave_the_record_and_numbers_that_are_no_slots_are_left_out():
    """What was written there is still known, its bytes are not; other slots keep both."""
    canary = served(scrub_budget="0").canary
    state = canary.states["full"]
    records, fingerprints = state.records.clone(), state.fingerprints.clone()
    written = (records[:, POSITION] % STATES == State.WRITTEN).nonzero().flatten()
    canary.slots.forget_bytes("full", torch.tensor([-1, int(written[0]), 10_000, -1]))
    canary.slots.forget_bytes("full", torch.tensor([-1, 10_000]))
    canary.slots.forget_bytes("full", torch.tensor([], dtype=torch.int64))
    fingerprints[written[0]] = 0
    assert torch.equal(state.records, records)
    assert torch.equal(state.fingerprints, fingerprints)


@pytest.mark.parametrize("adopts", [True, False])
def test_a_write_that_leaves_another_region_s_bytes_is_lost_once_these_are_adopted(adopts):
    """Without that nothing is known of them. Numbers that are no slots are left out, and records stay as they are."""
    guarded = Guarded(ToyEngine())
    engine, slots = guarded.engine, guarded.canary.slots
    guarded.submit(tokens=3)
    coming = torch.tensor(engine.free[:3])
    for tensor in (*engine.k, *engine.v):
        tensor[coming] = 7.0
    before = records(guarded).clone()
    if adopts:
        slots.adopt_bytes("full", torch.cat((coming, torch.tensor([-1, 10_000]))))
        slots.adopt_bytes("full", torch.tensor([], dtype=torch.int64))
    assert torch.equal(records(guarded), before)
    kept, batch = engine.v[1].clone(), engine.batch()
    guarded.canary.step.before(batch)
    engine.forward(batch)
    engine.v[1].copy_(kept)
    guarded.canary.step.after(batch)
    guarded.canary.step.end()
    guarded.canary.drain()
    found = {(v.kind, v.slot, v.layer, v.half) for v in guarded.violations}
    assert found == ({(Kind.LOST_WRITE, slot, 1, "v") for slot in coming.tolist()} if adopts else set())


def test_a_mark_that_finds_no_slot_changes_nothing(guarded):
    """Slots that are none, such as those of evicted window entries, are left out of every mark."""
    guarded.submit(tokens=20)
    guarded.step()
    state = guarded.canary.states["full"]
    before = state.records.clone(), state.fingerprints.clone()
    guarded.canary.slots.forget("full", torch.tensor([-1, 64]))
    assert torch.equal(state.records, before[0])
    assert torch.equal(state.fingerprints, before[1])


def test_whether_a_slot_still_holds_what_a_forward_wrote():
    """Not once it was written again, freed, or given up, nor for another forward or region."""
    guarded = served()
    slots = guarded.canary.slots
    assert slots.still_holds("full", 2, step=1)
    assert not slots.still_holds("full", 2, step=2)
    assert not slots.still_holds("full", 9, step=1)
    assert not slots.still_holds("mamba", 2, step=1)
    slots.forget("full", torch.tensor([2]))
    slots.free("full", torch.tensor([3]))
    slots.settle()
    assert [slots.still_holds("full", slot, step=1) for slot in (1, 2, 3)] == [True, False, False]


def test_a_canary_carries_over_what_another_one_knew():
    """Slots have moved to a new pool: records, bytes and the number of the step go along, and the requests go on."""
    old = served()
    new = Guarded(ToyEngine(slots=128))
    source, destination = torch.tensor([1, 2, 3]), torch.tensor([101, 102, 103])
    for before, after in zip((*old.engine.k, *old.engine.v), (*new.engine.k, *new.engine.v), strict=True):
        after[destination] = before[source]
    new.canary.slots.carry_over(old.canary.slots, "full", source, destination)
    (request,) = old.engine.requests
    request.slots = destination.tolist()
    new.engine.requests.append(request)
    new.decode()
    new.canary.drain()
    assert new.violations == []
    assert new.canary.stats()["checked_slots"] == 3
    assert records(new)[[101, 1], STEP_WRITTEN].tolist() == [1, 2]


EVENTS = {
    "free": lambda slots, region, some: slots.free(region, some),
    "alloc": lambda slots, region, some: slots.alloc(region, some),
    "copy": lambda slots, region, some: slots.copy(region, some, some),
    "clear": lambda slots, region, some: slots.clear(region, some),
    "forget": lambda slots, region, some: slots.forget(region, some),
    "forget_bytes": lambda slots, region, some: slots.forget_bytes(region, some),
    "adopt_bytes": lambda slots, region, some: slots.adopt_bytes(region, some),
    "expect_zeros": lambda slots, region, some: slots.expect_zeros(region, some),
    "expect": lambda slots, region, some: slots.expect(region, some),
    "check": lambda slots, region, some: slots.check(region, some),
    "expect_prefix": lambda slots, region, some: slots.expect_prefix(region, "full", some, some, some),
    "export_records": lambda slots, region, some: slots.export_records(region, some),
    "import_records": lambda slots, region, some: slots.import_records(
        region, some, torch.zeros(2, 9, dtype=torch.int64)
    ),
    "carry_over": lambda slots, region, some: slots.carry_over(slots, region, some, some),
}
"""Each event about slots, with the same ones wherever it takes any."""

NO_SLOTS = {
    "a list": [1, 2],
    "a NoneType": None,
    "a int": 3,
    "torch.float32": torch.tensor([1.0, 2.0]),
    "torch.bool": torch.tensor([True, False]),
    "2 dimensions": torch.tensor([[1, 2]]),
    "0 dimensions": torch.tensor(1),
    "one on meta": torch.tensor([1, 2], device="meta"),
}
"""What can't be slots, by what a sentence says of it."""


def refused(guarded: Guarded) -> list[str]:
    """The sentences of what was refused, while Canary stays on and nothing has changed."""
    guarded.canary.drain()
    assert guarded.canary.enabled
    assert guarded.findings.told("disabled") == []
    assert guarded.violations == []
    assert not records(guarded).any()
    assert not guarded.canary.slots.counts["full"]
    assert {event.level for event in guarded.findings.told("misuse")} <= {"error"}
    return [str(event.fields["reason"]) for event in guarded.findings.told("misuse")]


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_of_an_unknown_region_is_told_once(guarded, event):
    """With the regions that there are; it changes nothing, and another name is told anew."""
    for region in ("mamba", "mamba", "Full"):
        EVENTS[event](guarded.canary.slots, region, torch.tensor([1, 2]))
    told = refused(guarded)
    assert [("'mamba'" in text, "'Full'" in text) for text in told] == [(True, False), (False, True)]
    assert all(text.startswith(f"slots.{event}: no region") and "there are full" in text for text in told)


@pytest.mark.parametrize(
    ("event", "got"), [(e, g) for e in EVENTS for g in NO_SLOTS if (e, g) != ("clear", "a NoneType")]
)
def test_what_can_not_be_slots_is_refused(guarded, event, got):
    """In log mode nothing is raised into the engine, and each sort is told once, with what was got."""
    if (event, got) == ("forget", "a NoneType"):
        pytest.skip("None is all of the region")
    for _ in range(2):
        EVENTS[event](guarded.canary.slots, "full", NO_SLOTS[got])
    (text,) = refused(guarded)
    assert text.startswith(f"slots.{event}: ")
    assert f"must be an integer tensor [n] on cpu, got {got}; " in text


PAIRS = {
    "copy": lambda slots, one, two: slots.copy("full", one, two),
    "carry_over": lambda slots, one, two: slots.carry_over(slots, "full", one, two),
    "expect_prefix": lambda slots, one, two: slots.expect_prefix("full", "full", one, two, two),
    "import_records": lambda slots, one, two: slots.import_records("full", one, two[:, None]),
}


@pytest.mark.parametrize("event", PAIRS)
def test_what_belongs_together_has_one_length(guarded, event):
    """Slots that are copied and where to, slots and their rows, whatever number there is."""
    for count in (3, 4):
        PAIRS[event](guarded.canary.slots, torch.tensor([1, 2]), torch.arange(count))
    (text,) = refused(guarded)
    assert text.startswith(f"slots.{event}: ")
    assert "3" in text


@pytest.mark.parametrize("event", ["free", "alloc"])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"page_slots": 0}, "page_slots must be an integer of at least 1, got 0"),
        ({"page_slots": 2.0}, "page_slots must be an integer of at least 1, got 2.0"),
        ({"writer": "request-1"}, "writer must be a number of canary.writers.id(name)"),
        ({"writer": torch.tensor([1, 2])}, "got a Tensor; -1 is for nobody"),
    ],
)
def test_an_owner_and_a_page_must_be_numbers(guarded, event, wrong, says):
    """A request's name is no writer."""
    getattr(guarded.canary.slots, event)("full", torch.tensor([1, 2]), **wrong)
    (text,) = refused(guarded)
    assert text.startswith(f"slots.{event}: ")
    assert says in text


def test_a_misused_event_is_an_error_in_raise_mode():
    """With the sentence of log mode."""
    slots = Guarded(mode="raise").canary.slots
    with pytest.raises(MisuseError, match=r"slots\.free: no region 'mamba' is guarded; there are full"):
        slots.free("mamba", torch.tensor([1]))
    with pytest.raises(MisuseError, match=r"slots\.alloc: slots must be .* got a list"):
        slots.alloc("full", [1])


def test_events_are_counted_by_region_and_kind():
    """Each call is one, also of no slots, so that what was never told shows."""
    slots = Guarded(ToyEngine(window=4)).canary.slots
    for _ in range(3):
        slots.alloc("full", torch.tensor([1]))
    slots.free("full", torch.tensor([], dtype=torch.int64))
    slots.clear("window", None)
    slots.end_lifetime("window")
    assert slots.counts == {"full": {"alloc": 3, "free": 1}, "window": {"clear": 1, "end_lifetime": 1}}


def test_what_is_told_of_no_region_of_ours_does_nothing(guarded):
    """Each event of a region that is not guarded, and each of a Canary that is off, which tells nothing more."""
    slots, some = guarded.canary.slots, torch.tensor([1, 2])

    def tell_all(region: str) -> None:
        for event in (slots.alloc, slots.park, slots.share, slots.evict, slots.free):
            event(region, some)
        slots.end_lifetime(region)
        slots.copy(region, some, some + 2)
        slots.clear(region, some)
        slots.forget(region, None)
        slots.forget_bytes(region, some)
        slots.adopt_bytes(region, some)
        slots.expect_zeros(region, some)
        slots.expect(region, some)
        slots.check(region, some)
        slots.import_records(region, some, torch.zeros(2, 9, dtype=torch.int64))
        slots.settle()

    fingerprints = guarded.canary.states["full"].fingerprints.clone()
    tell_all("mamba")
    assert slots.export_records("mamba", some).shape == (2, 0)
    assert slots.payload_layout("mamba") is None
    guarded.canary.close()
    told = len(guarded.findings.events)
    tell_all("full")
    tell_all("mamba")
    assert len(guarded.findings.events) == told
    slots.defer(lambda: pytest.fail("told although Canary is off"))
    assert not records(guarded).any()
    assert torch.equal(guarded.canary.states["full"].fingerprints, fingerprints)
    assert not slots.export_records("full", some).any()
    assert guarded.findings.told("disabled") == []


def test_numbers_that_are_no_slots_are_left_out_where_bytes_are_zero_or_unknown() -> None:
    """As with every event: nothing of it reaches the engine."""
    guarded = Guarded()
    canary = guarded.canary
    state = canary.states["full"]
    before = state.fingerprints.clone()
    numbers = torch.tensor([1 << 40, -1, 9999])
    canary.slots.expect_zeros("full", numbers)
    canary.slots.forget_bytes("full", numbers)
    assert torch.equal(state.fingerprints, before)
    canary.slots.expect_zeros("full", torch.tensor([5, 1 << 40]))
    assert torch.equal(state.fingerprints[5], state.sources.salts[: len(state.sources)])
    canary.slots.forget_bytes("full", torch.tensor([5, -1]))
    assert state.fingerprints[5].eq(0).all()
    assert canary.enabled
