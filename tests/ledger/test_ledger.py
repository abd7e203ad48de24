"""The ledger on a toy engine with a host tier: what comes back wrong is found and named, and nothing else."""

from dataclasses import replace

import pytest
import torch
from ledger.host_tier import PAGE, HostTier
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core import Arrival, AttachError, Kind, MisuseError, Origin, Phase, State, ViolationError, block_hashes
from canary_core.ops.backends import triton_backend
from canary_core.records import POSITION, STATES

PROMPT = list(range(5, 22))
"""Four complete blocks and a token."""


def flip(block, source, slot=1):
    """A fault: one bit of one slot's bytes."""

    def fault(b, s, data):
        if (b, s) == (block, source):
            data.view(torch.uint8)[slot, 3] ^= 1
        return data

    return fault


def found(tier):
    """What was found, by what a user needs to know."""
    tier.g.canary.drain()
    return [(v.kind, v.position, v.sources, v.origin, v.request) for v in tier.g.violations]


@pytest.mark.parametrize("expected", [False, True])
def test_clean_reloads_are_silent(expected):
    """Hundreds of blocks that come back as they were, before a forward or while it runs, are compared, and nothing is
    found; the forwards that read them are checked."""
    tier = HostTier.make(engine=ToyEngine(slots=256))
    prompts = [[7 + i, *PROMPT[1:]] for i in range(5)]
    for prompt in prompts:
        request = tier.compute(prompt)
        tier.save(request)
        tier.finish(request)
    for round_ in range(12):
        for prompt in prompts:
            request, arrival = tier.claim(prompt, f"again{round_}")
            if expected:
                tier.g.canary.ledger.expect(arrival)
                tier.g.step(fault=lambda request=request: tier.copy(request))
                tier.g.canary.ledger.arrive(arrival)
            else:
                tier.copy(request)
                tier.g.canary.ledger.arrive(arrival)
            tier.g.step()
            tier.finish(request)
    assert tier.g.violations == []
    assert tier.counts("compared", "matched", "unknown", "rewritten") == [240, 240, 0, 0]
    assert tier.g.canary.stats()["unknown_slots"] == 0
    assert tier.g.canary.stats()["checked_slots"] > 240 * PAGE


def test_a_flipped_bit_is_told_with_layer_and_half():
    """Of the block, the source and the request: and where it came from."""
    tier = HostTier.make()
    request = tier.compute(PROMPT)
    tier.save(request)
    again = tier.load(PROMPT, flip(block=2, source=3))
    assert found(tier) == [(Kind.ARRIVAL, 8, ("v.1",), "tier", "again")]
    told = tier.g.violations[0]
    assert (told.layer, told.half, told.source, told.slot) == (1, "v", "v.1", again.slots[8])
    assert (told.phase, told.detail) == (Phase.EVENT, "positions 8 to 11; 1 of 4 sources differs: layer 1 V")
    assert tier.counts("matched", "differing") == [3, 1]


@pytest.mark.parametrize(
    ("fault", "sources"),
    [
        (lambda b, s, data: data[[1, 0, 2, 3]] if b == 1 else data, ("k.0", "v.0", "k.1", "v.1")),
        (lambda b, s, data: data * 0 if b == 1 and s in (2, 3) else data, ("k.1", "v.1")),
        (lambda b, s, data: data * 0 if b == 1 and s in (1, 3) else data, ("v.0", "v.1")),
        (lambda b, s, data: torch.cat((data[:, :12], 0 * data[:, 12:]), 1) if b == 1 and s == 0 else data, ("k.0",)),
    ],
    ids=["slots swapped", "a layer left out", "no values", "half of the heads"],
)
def test_what_differs_is_named_exactly(fault, sources):
    """Slots that changed places, a layer or a half that did not come, half of a slot: just these sources are told."""
    tier = HostTier.make()
    tier.save(tier.compute(PROMPT))
    tier.load(PROMPT, fault)
    assert found(tier) == [(Kind.ARRIVAL, 4, sources, "tier", "again")]


def test_the_block_of_another_request_is_found():
    """Bytes that are right somewhere else: every source of every block differs, and whose they are is told."""
    tier = HostTier.make()
    other = [t + 40 for t in PROMPT]
    for prompt in (PROMPT, other):
        request = tier.compute(prompt)
        tier.save(request)
        tier.finish(request)
    wrong = {key: tier.stored[tuple(t + 40 for t in key)] for key in tier.stored if key[0] == PROMPT[0]}
    tier.stored.update(wrong)
    tier.load(PROMPT)
    assert [f[1:3] for f in found(tier)] == [(4 * b, ("k.0", "v.0", "k.1", "v.1")) for b in range(4)]
    assert [(v.rule, v.stored_position, v.stored_request) for v in tier.g.violations] == [
        ("another_sequence", 4 * b, "first") for b in range(4)
    ]
    assert tier.counts("another_sequence", "differing") == [4, 0]


def test_raise_mode_stops_the_engine():
    """At the end of the step after the bytes came."""
    tier = HostTier.make(mode="raise")
    tier.save(tier.compute(PROMPT))
    with pytest.raises(ViolationError) as error:
        tier.load(PROMPT, flip(0, 0))
    assert error.value.violation.kind is Kind.ARRIVAL


def test_what_was_wrong_once_stays_wrong():
    """Blocks that came back wrong are in the pool, and kept again like all others: that makes them no more right."""
    tier = HostTier.make()
    tier.save(tier.compute(PROMPT))
    for name in ("again", "and again"):
        request = tier.load(PROMPT, flip(0, 0), name)
        tier.g.canary.ledger.keep("full", torch.tensor(request.slots[: 4 * PAGE]), PAGE)
        tier.g.step()
        tier.finish(request)
    assert [v.request for v in tier.g.violations if v.kind is Kind.ARRIVAL] == ["again", "and again"]
    assert tier.counts("differing") == [2]


def test_a_prefix_computed_twice_has_two_entries():
    """With other numerics: each is right, and a third one is not."""
    tier = HostTier.make()
    tier.save(tier.compute(PROMPT))
    once = dict(tier.stored)
    forward = tier.g.engine.forward

    def other_numerics(batch):
        forward(batch)
        for tensor in tier.tensors:
            tensor[batch.tables["full"].write_slots.long()] *= 1.5

    tier.g.engine.forward = other_numerics
    tier.save(tier.compute(PROMPT, "second"))
    tier.g.engine.forward = forward
    assert not torch.equal(once[tuple(PROMPT[:4])][0], tier.stored[tuple(PROMPT[:4])][0])
    tier.finish(tier.load(PROMPT))
    tier.stored = once
    tier.finish(tier.load(PROMPT))
    assert found(tier) == []
    tier.load(PROMPT, flip(3, 2))
    assert found(tier) == [(Kind.ARRIVAL, 12, ("k.1",), "tier", "again")]


def test_what_is_kept_is_what_was_computed_whatever_happens_to_the_slots():
    """Slots that are freed, handed out and written again right after they were told hold their old content for the
    ledger: events take effect in the order in which they were told."""
    tier = HostTier.make()
    slots = torch.tensor(tier.g.engine.free[: len(PROMPT)])
    tier.g.canary.slots.alloc("full", slots)
    request = tier.compute(PROMPT)
    assert request.slots == slots.tolist()
    tier.save(request)
    tier.g.canary.slots.free("full", slots)
    tier.finish(request)
    tier.g.engine.free.sort()
    tier.g.canary.slots.alloc("full", slots)
    other = tier.compute([t + 60 for t in PROMPT], "other")
    assert other.slots == slots.tolist()
    tier.load(PROMPT)
    assert found(tier) == []
    assert tier.counts("kept", "matched", "unclear") == [4, 4, 0]


def test_a_block_that_a_forward_writes_again_is_left_out():
    """A full hit whose last token is computed all the same, in the block that came: nobody can say what came there. The
    forward's own bytes are recorded as ever, and the other blocks are compared."""
    tier = HostTier.make()
    tier.save(tier.compute(PROMPT))
    request, arrival = tier.claim(PROMPT[:16], cached=16)
    tier.g.canary.ledger.expect(arrival)
    tier.copy(request)
    again = request.slots[15]
    request.cached, request.slots = 15, request.slots[:15]
    tier.g.engine.free.insert(0, again)
    forward = tier.g.engine.forward

    def other_numerics(batch):
        forward(batch)
        tier.tensors[0][again] *= 2

    tier.g.engine.forward = other_numerics
    tier.g.step()
    tier.g.engine.forward = forward
    tier.g.canary.ledger.arrive(arrival)
    tier.g.step()
    assert found(tier) == []
    assert tier.counts("matched", "rewritten") == [3, 1]
    tier.g.canary.slots.check("full", arrival.slots)
    assert found(tier) == []


def test_an_arrival_between_check_and_record_leaves_the_forwards_slots_alone():
    """As from a listener's `after`: what the forward in flight writes is recorded as its own."""
    tier = HostTier.make()
    tier.save(tier.compute(PROMPT))
    engine, canary = tier.g.engine, tier.g.canary
    tier.g.decode()
    request, arrival = tier.claim(PROMPT[:16], cached=16)
    canary.ledger.expect(arrival)
    again = request.slots[15]
    request.cached, request.slots = 15, request.slots[:15]
    engine.free.insert(0, again)
    batch = engine.batch()
    canary.step.before(batch)
    whole = replace_cached(tier, request)
    engine.forward(batch)
    for tensor in tier.tensors:
        tensor[again] *= 2
    canary.ledger.arrive(arrival)
    canary.step.after(batch)
    canary.step.end()
    assert whole == 4
    assert found(tier) == []
    assert tier.counts("matched", "rewritten") == [3, 1]
    canary.slots.check("full", torch.tensor(request.slots))
    assert found(tier) == []


def replace_cached(tier, request):
    """Copies all four blocks to ``request``, whose last slot the forward will write."""
    cached, request.cached = request.cached, 16
    tier.copy(request)
    request.cached = cached
    return 4


def test_slots_that_were_handed_to_somebody_else_are_left_out():
    """The request is gone before its bytes were looked at, and its slots are another's."""
    tier = HostTier.make()
    tier.save(tier.compute(PROMPT))
    request, arrival = tier.claim(PROMPT)
    tier.g.canary.ledger.expect(arrival)
    tier.copy(request)
    tier.finish(request)
    tier.g.canary.slots.free("full", arrival.slots)
    tier.g.engine.free.sort()
    tier.g.canary.slots.alloc("full", arrival.slots)
    tier.compute([t + 60 for t in PROMPT], "other")
    tier.g.canary.ledger.arrive(arrival)
    tier.g.step()
    assert found(tier) == []
    assert tier.counts("rewritten", "compared") == [4, 0]


def test_an_arrival_that_is_given_up_is_not_judged():
    """The transfer failed: whatever is there is nobody's word."""
    tier = HostTier.make()
    tier.save(tier.compute(PROMPT))
    request, arrival = tier.claim(PROMPT)
    tier.g.canary.ledger.expect(arrival)
    tier.g.canary.ledger.give_up(arrival)
    tier.g.step()
    assert found(tier) == []
    states = tier.g.canary.states["full"].records[arrival.slots, POSITION]
    assert {State.of(word) for word in states.tolist()} == {State.UNKNOWN}
    assert tier.g.canary.stats()["unknown_slots"] == len(request.slots[:16])


def test_what_arrived_is_watched_from_then_on():
    """The scrub finds a bit that flips after the bytes came, the check a foreign slot in the table."""
    tier = HostTier.make(scrub_budget="1GiB")
    tier.save(tier.compute(PROMPT))
    request = tier.load(PROMPT)
    tier.tensors[2][request.slots[5]].view(torch.uint8)[0] ^= 4
    tier.g.step()
    tier.g.canary.drain()
    assert [(v.kind, v.slot, v.source) for v in tier.g.violations] == [(Kind.BYTES, request.slots[5], "k.1")]
    tier.g.engine.table[tier.g.engine.requests.index(request), 3] = request.slots[8]
    tier.g.engine.requests[-1].tokens.append(9)
    batch = tier.g.engine.batch()
    tier.g.engine.table[tier.g.engine.requests.index(request), 3] = request.slots[8]
    tier.g.canary.step.before(batch)
    tier.g.canary.drain()
    assert tier.g.violations[-1].kind is Kind.POSITION


def test_a_prefix_that_was_never_kept_says_that_others_store_there():
    """Its origin counts as shared from then on: an event says so once, and a difference is no finding."""
    tier = HostTier.make()
    request = tier.compute(PROMPT)
    tier.save(request)
    other = tier.compute([t + 40 for t in PROMPT], "other")
    tier.save(other, keep=False)
    tier.load(other.tokens)
    tier.load(PROMPT, flip(1, 1))
    assert found(tier) == []
    events = [e for e in tier.g.findings.events if e.name == "ledger_shared"]
    assert [e.fields["origin"] for e in events] == ["tier"]
    assert tier.counts("unknown", "matched") == [5, 3]


@pytest.mark.parametrize(
    ("origin", "count"), [(Origin("disk", shared=True), "unknown"), (Origin("fp8", lossy=True), "lossy")]
)
def test_where_a_difference_proves_nothing_it_is_counted(origin, count):
    """Others store there, too, or what comes back is not bit by bit what was stored."""
    tier = HostTier.make(origin=origin)
    tier.save(tier.compute(PROMPT))
    tier.load(PROMPT, flip(1, 1))
    assert found(tier) == []
    assert tier.counts("matched", count) == [3, 1]


def test_what_was_evicted_is_unknown_for_good():
    """A small ledger forgets. Of what it forgot it never says that bytes are wrong, not even when the prefix is
    computed and kept again."""
    tier = HostTier.make(engine=ToyEngine(slots=512), ledger=3 * 208)
    tier.save(tier.compute(PROMPT))
    tier.load(PROMPT, flip(0, 0))
    tier.save(tier.compute(PROMPT, "once more"))
    tier.load(PROMPT, flip(0, 0), "last")
    assert found(tier) == []
    entries, evicted, unknown = tier.counts("entries", "evicted", "unknown")
    assert entries <= 3
    assert evicted > 0
    assert unknown > 0


def test_blocks_of_which_the_prefix_is_not_known_leave_it_in_doubt():
    """They were stored all the same. Others are judged as ever."""
    tier = HostTier.make()
    tier.save(tier.compute(PROMPT))
    other = [t + 40 for t in PROMPT]
    request = tier.compute(other, "other")
    tier.save(request)
    # What was stored first had other bytes, and then its prefix was not known.
    second = tier.compute(other, "unknown prefix")
    tier.g.canary.slots.settle()
    tier.g.canary.states["full"].records[torch.tensor(second.slots), 2:4] = 0
    tier.g.canary.ledger.keep("full", torch.tensor(second.slots[:16]), PAGE)
    tier.load(other, flip(0, 0))
    assert found(tier) == []
    tier.load(PROMPT, flip(0, 0))
    assert [f[1] for f in found(tier)] == [0]
    assert tier.counts("unclear") == [4]


def test_blocks_of_which_nothing_is_known_leave_all_in_doubt():
    """Nobody can say what they were: an event says so once, and differences are counted."""
    tier = HostTier.make()
    request = tier.compute(PROMPT)
    tier.save(request)
    tier.g.canary.ledger.keep("full", torch.arange(100, 108), PAGE)
    tier.load(PROMPT, flip(0, 0))
    assert found(tier) == []
    assert [e.fields["region"] for e in tier.g.findings.events if e.name == "ledger_blind"] == ["full"]
    assert tier.counts("unknown", "matched") == [1, 3]


def test_blocks_that_are_kept_before_their_bytes_came_are_no_loss():
    """As where a plugin keeps all of a request's blocks after each forward: what is still to come is entered then."""
    tier = HostTier.make()
    tier.save(tier.compute(PROMPT))
    request, arrival = tier.claim(PROMPT)
    tier.g.canary.ledger.expect(arrival)
    tier.g.canary.ledger.keep("full", arrival.slots, PAGE)
    tier.g.step(fault=lambda: tier.copy(request, flip(2, 0)))
    tier.g.canary.ledger.arrive(arrival)
    tier.g.step()
    assert [f[1] for f in found(tier)] == [8]
    assert tier.counts("unclear") == [0]


def test_partial_blocks_are_counted_and_recorded():
    """A block of which not all came can't be compared; its slots are recorded like the others."""
    tier = HostTier.make()
    tier.save(tier.compute(PROMPT))
    tier.g.canary.ledger.keep("full", torch.arange(1, 7), PAGE)
    request, arrival = tier.claim(PROMPT, cached=16)
    tier.copy(request)
    part = replace(arrival, slots=arrival.slots[2:15], tokens=PROMPT[:15])
    tier.g.canary.slots.forget("full", arrival.slots)
    tier.g.canary.ledger.arrive(part)
    assert tier.counts("matched", "partial") == [2, 3]
    words = tier.g.canary.states["full"].records[part.slots, POSITION].tolist()
    assert [word // STATES for word in words] == list(range(2, 15))
    assert {State.of(word) for word in words} == {State.WRITTEN}


def test_pages_are_blocks_by_number():
    """A pool of pages is told by their numbers: the same entries."""
    tier = HostTier.make()
    tier.g.engine.free = list(range(8, 128))
    request = tier.compute(PROMPT)
    assert request.slots[:16] == list(range(8, 24))
    tier.save(request, keep=False)
    tier.g.canary.ledger.keep_pages("full", torch.arange(2, 6), PAGE)
    tier.load(PROMPT, flip(1, 2))
    assert [f[1:3] for f in found(tier)] == [(4, ("k.1",))]
    assert tier.counts("kept", "matched") == [4, 3]


def test_nothing_comes_of_nothing():
    """No slots, no blocks: no error, no count."""
    tier = HostTier.make()
    none = torch.empty(0, dtype=torch.int64)
    tier.g.canary.ledger.keep("full", none, PAGE)
    tier.g.canary.ledger.arrive(Arrival("full", none, [], tier.origin, PAGE))
    assert tier.counts("kept", "compared", "partial") == [0, 0, 0]
    assert found(tier) == []


def test_an_anchor_sets_sequences_apart():
    """The same tokens under another adapter are another prefix; without a known one nothing is judged."""
    tier = HostTier.make()
    tier.save(tier.compute(PROMPT))
    for anchor in (12345, 0):
        request, arrival = tier.claim(PROMPT)
        tier.copy(request, flip(0, 0))
        tier.g.canary.ledger.arrive(replace(arrival, anchor=anchor))
        tier.finish(request)
    assert found(tier) == []
    assert tier.counts("matched", "unknown", "unjudged") == [0, 4, 4]


def test_entries_of_a_peer_are_as_good_as_our_own():
    """A prefill engine's entries let the decode engine judge what it gets; what is in doubt there is in doubt here."""
    prefill, decode = HostTier.make(), HostTier.make()
    prefill.save(prefill.compute(PROMPT))
    prefill.save(prefill.compute([t + 40 for t in PROMPT], "other"))
    hashes = block_hashes(PROMPT, PAGE)
    data = prefill.g.canary.ledger.export("full", PAGE, hashes)
    assert decode.g.canary.ledger.import_entries("full", PAGE, data) == 4
    decode.stored = prefill.stored
    decode.finish(decode.load(PROMPT))
    assert found(decode) == []
    decode.load(PROMPT, flip(3, 2))
    assert [f[1:3] for f in found(decode)] == [(12, ("k.1",))]
    assert decode.counts("imported", "matched", "differing") == [4, 7, 1]


def test_doubt_travels():
    """What the exporting side is not sure of proves nothing on the other."""
    prefill, decode = HostTier.make(), HostTier.make()
    request = prefill.compute(PROMPT)
    prefill.save(request)
    prefill.g.canary.slots.settle()
    prefill.g.canary.states["full"].records[torch.tensor(request.slots), 2:4] = 0
    prefill.g.canary.ledger.keep("full", torch.tensor(request.slots[:16]), PAGE)
    decode.g.canary.ledger.import_entries("full", PAGE, prefill.g.canary.ledger.export("full", PAGE))
    decode.stored = prefill.stored
    decode.load(PROMPT, flip(3, 2))
    assert found(decode) == []
    assert decode.counts("unknown") == [1]


@pytest.mark.parametrize("cut", [slice(0, 40), slice(0, -8), slice(8, None), slice(0, -3)])
def test_entries_that_are_no_entries_are_refused(cut):
    """Cut short or something else: an error says so."""
    tier = HostTier.make()
    tier.save(tier.compute(PROMPT))
    data = tier.g.canary.ledger.export("full", PAGE)
    with pytest.raises(AttachError, match="ledger entries"):
        tier.g.canary.ledger.import_entries("full", PAGE, data[cut])


def test_entries_of_another_layout_are_refused():
    """Another rank, another cache: their values mean nothing here."""
    tier, other = HostTier.make(), HostTier.make(rank=1)
    tier.save(tier.compute(PROMPT))
    data = tier.g.canary.ledger.export("full", PAGE)
    with pytest.raises(AttachError, match="another layout"):
        other.g.canary.ledger.import_entries("full", PAGE, data)


@pytest.mark.parametrize("settings", [{"ledger": 0}, {"bytes": "off"}])
def test_without_a_ledger_arrivals_are_recorded(settings):
    """Nothing is kept and nothing compared, but forwards that read the slots are checked."""
    tier = HostTier.make(**settings)
    tier.save(tier.compute(PROMPT))
    tier.load(PROMPT, flip(0, 0))
    assert found(tier) == []
    assert not [name for name in tier.g.canary.stats() if name.startswith("ledger_")]
    assert tier.g.canary.stats()["unknown_slots"] == 0
    assert tier.g.canary.ledger.export("full", PAGE) == b""
    assert tier.g.canary.ledger.import_entries("full", PAGE, b"") == 0


def test_off_mode_costs_nothing():
    """No call does anything."""
    tier = HostTier.make(mode="off")
    ledger = tier.g.canary.ledger
    arrival = Arrival("full", torch.arange(1, 5), [1, 2, 3, 4], tier.origin, PAGE)
    ledger.keep("full", torch.arange(1, 5), PAGE)
    ledger.expect(arrival)
    ledger.arrive(arrival)
    ledger.give_up(arrival)
    assert ledger.stats() == {}
    assert ledger.export("full", PAGE) == b""


@pytest.mark.parametrize(
    ("region", "slots", "page_slots"),
    [
        ("fool", torch.arange(4), PAGE),
        ("full", [1, 2, 3, 4], PAGE),
        ("full", torch.zeros(4), PAGE),
        ("full", torch.arange(4), 0),
        ("full", torch.arange(16), 2 * PAGE),
    ],
)
def test_calls_that_cant_be_right_are_refused(region, slots, page_slots):
    """As elsewhere: a sentence that says what to do, an error in raise mode."""
    for mode in ("log", "raise"):
        g = Guarded(mode=mode)
        g.canary.ledger.keep("full", torch.arange(1, 5), PAGE)
        if mode == "raise":
            with pytest.raises(MisuseError, match="ledger"):
                g.canary.ledger.keep(region, slots, page_slots)
        else:
            g.canary.ledger.keep(region, slots, page_slots)
            assert [e.fields["reason"][:6] for e in g.findings.events if e.name == "misuse"] == ["ledger"]


def test_an_arrival_says_what_is_wrong_with_it():
    """Fewer tokens than slots, blocks of no slots."""
    slots = torch.arange(8)
    with pytest.raises(AttachError, match="tokens must be all of the sequence"):
        Arrival("full", slots, [1, 2, 3], Origin("tier"), PAGE)
    with pytest.raises(AttachError, match="page_slots"):
        Arrival("full", slots, list(range(8)), Origin("tier"), 0)


def test_windows_are_judged_by_their_own_slots():
    """A region of a sliding window has a ledger of its own; slots that it has evicted are left out."""
    tier = HostTier.make(engine=ToyEngine(slots=128, window=6))
    request = tier.compute(PROMPT)
    full = torch.tensor(request.slots[:16])
    windowed = tier.g.canary.regions["window"].slots_of(full)
    tier.g.canary.ledger.keep("window", torch.where(windowed == 0, -1, windowed), PAGE)
    kept = [s for s in windowed.tolist() if s > 0]
    assert tier.counts("kept", "partial") == [len(kept) // PAGE, 4 - len(kept) // PAGE]


def test_the_kernels_do_the_same(monkeypatch):
    """On Triton's interpreter: a clean reload is silent, a flip is told."""
    tier = HostTier.make(backend="triton")
    assert tier.g.canary.states["full"].region.name == "full"
    assert triton_backend().name == "triton"
    tier.save(tier.compute(PROMPT))
    tier.finish(tier.load(PROMPT))
    assert found(tier) == []
    tier.load(PROMPT, flip(1, 2))
    assert [f[1:3] for f in found(tier)] == [(4, ("k.1",))]


def test_inference_mode_or_not_is_all_the_same():
    """Engines tell it within inference mode, and it is read in either."""
    tier = HostTier.make()
    with torch.inference_mode():
        tier.save(tier.compute(PROMPT))
        tier.finish(tier.load(PROMPT))
    tier.save(tier.compute([t + 40 for t in PROMPT], "other"))
    tier.load(PROMPT, flip(0, 0))
    assert [f[1] for f in found(tier)] == [0]
    assert tier.counts("kept", "matched") == [8, 7]


@pytest.mark.gpu
def test_reloads_on_a_gpu():
    """Compiled, with copies to the host that nobody waits for: hundreds of blocks are silent, a flip is told, and a
    block kept right before its slots are written again is kept as it was."""
    tier = HostTier.make(engine=ToyEngine(slots=256, device="cuda"))
    tier.save(tier.compute(PROMPT))
    for turn in range(60):
        tier.finish(tier.load(PROMPT, name=f"again {turn}"))
    assert found(tier) == []
    assert tier.counts("matched", "rewritten") == [240, 0]
    for block in range(4):
        for source in range(4):
            tier.finish(tier.load(PROMPT, flip(block, source), f"flip {block} {source}"))
    assert [(f[1], f[2]) for f in found(tier)] == [
        (4 * block, (name,)) for block in range(4) for name in ("k.0", "v.0", "k.1", "v.1")
    ]
