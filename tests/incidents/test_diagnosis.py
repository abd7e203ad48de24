"""`diagnose` with evidence of a running engine: each class is broken from outside, and named."""

import pytest
import torch
from ledger.host_tier import HostTier
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core import Kind
from canary_core.kinds.classes import SURE
from canary_core.kinds.registry import classes


@pytest.fixture
def served():
    """A toy engine of four layers whose two requests have twenty tokens each; all bytes are compared before each
    forward."""
    guarded = Guarded(ToyEngine(layers=4), read_check=-1)
    one, two = guarded.submit("a", 20), guarded.engine.submit("b", list(range(40, 60)))
    for _ in range(3):
        guarded.step(8)
    return guarded, one, two


def first(guarded):
    """The only incident, after one more forward, and its first diagnosis."""
    guarded.decode()
    guarded.canary.drain()
    (incident,) = guarded.canary.incidents
    assert all(d.sure in SURE and classes()[d.name] is d.what and d.evidence for d in incident.diagnoses)
    return incident, incident.diagnoses[0]


def rows(guarded, source):
    """The tensor of a source: a row a slot."""
    half, layer = source.split(".")
    return getattr(guarded.engine, half)[int(layer)]


def test_a_flipped_bit_is_named_with_both_values(served):
    """Which bit, and what the word was: by the fingerprint alone, without an intact copy."""
    guarded, one, _ = served
    slot = one.slots[7]
    words = rows(guarded, "v.2").view(torch.int32)
    old = int(words[slot, 5]) & 0xFFFFFFFF
    words[slot, 5] ^= 1 << 22
    incident, diagnosis = first(guarded)
    assert (diagnosis.name, diagnosis.sure) == ("flipped_bit", "certain")
    told = diagnosis.evidence[0]
    assert f"bit 22 of 32-bit word 5 of slot {slot} in v.2" in told
    assert f"was 0x{old:08x} and is 0x{old ^ 1 << 22:08x}" in told
    assert incident.total == 1


@pytest.mark.parametrize(("words", "sure"), [((3, 9), "certain"), ((0, 11), "certain")])
def test_two_flipped_bits_are_named(served, words, sure):
    """One each of two words."""
    guarded, one, _ = served
    row = rows(guarded, "k.0").view(torch.int32)[one.slots[3]]
    for bit, word in enumerate(words):
        row[word] ^= 1 << (3 + bit)
    _, diagnosis = first(guarded)
    assert (diagnosis.name, diagnosis.sure) == ("flipped_bit", sure)
    assert all(f"word {word} of" in " ".join(diagnosis.evidence) for word in words)


def test_a_word_that_was_overwritten_is_no_flipped_bit(served):
    """More of its bits changed than flip."""
    guarded, one, _ = served
    rows(guarded, "k.1").view(torch.int32)[one.slots[3], 2] ^= 0x0F0F0FFF
    _, diagnosis = first(guarded)
    assert (diagnosis.name, diagnosis.sure) == ("overwritten_word", "likely")


@pytest.mark.parametrize(("fill", "name"), [(0, "zeroed"), (float("nan"), "poisoned"), (float("inf"), "poisoned")])
def test_fills_of_numbers(served, fill, name):
    """All bytes zero; NaN and infinity."""
    guarded, one, _ = served
    for source in ("k.1", "v.1"):
        rows(guarded, source)[one.slots[2:6]] = fill
    _, diagnosis = first(guarded)
    assert (diagnosis.name, diagnosis.sure) == (name, "likely")


@pytest.mark.parametrize(("byte", "name"), [(0xAB, "constant"), (0xFF, "poisoned")])
def test_fills_of_bytes(served, byte, name):
    """A pattern; 0xff is NaN in bfloat16."""
    guarded, one, _ = served
    rows(guarded, "k.1").view(torch.uint8)[one.slots[4]] = byte
    _, diagnosis = first(guarded)
    assert (diagnosis.name, f"0x{byte:02x}" in diagnosis.evidence[0]) == (name, True)


def test_pages_that_were_exchanged(served):
    """Each has what the other one should have, by their fingerprints."""
    guarded, one, two = served
    a, b = one.slots[4:8], two.slots[4:8]
    for tensor in (*guarded.engine.k, *guarded.engine.v):
        tensor[a], tensor[b] = tensor[b].clone(), tensor[a].clone()
    incident, diagnosis = first(guarded)
    assert (diagnosis.name, diagnosis.sure) == ("swapped", "certain")
    assert incident.total == 64


def test_kv_that_another_requests_was_written_over(served):
    """Who wrote it, and when, stands in the records of the slot that it belongs to."""
    guarded, one, two = served
    for tensor in (*guarded.engine.k, *guarded.engine.v):
        tensor[one.slots[4:8]] = tensor[two.slots[10:14]].clone()
    _, diagnosis = first(guarded)
    assert (diagnosis.name, diagnosis.sure) == ("overwritten", "certain")
    assert f"belong to slot {two.slots[10]}, which b wrote at step 2 as position 10" in " ".join(diagnosis.evidence)


def test_kv_of_another_layer(served):
    """The fingerprint of another source, less its salt."""
    guarded, one, _ = served
    rows(guarded, "k.1")[one.slots[4]] = rows(guarded, "v.3")[one.slots[4]]
    _, diagnosis = first(guarded)
    assert (diagnosis.name, diagnosis.sure) == ("wrong_layer", "certain")
    assert "in v.3" in diagnosis.evidence[0]


def test_kv_that_is_one_token_off(served):
    """Each slot holds what the position before it should have."""
    guarded, one, _ = served
    for tensor in (*guarded.engine.k, *guarded.engine.v):
        tensor[one.slots[5:12]] = tensor[one.slots[4:11]].clone()
    _, diagnosis = first(guarded)
    assert (diagnosis.name, diagnosis.sure) == ("shifted", "certain")


def noise(tensor, slots):
    """Bytes that nobody has written anywhere."""
    tensor[slots] = torch.randn(len(slots), tensor.shape[1]).to(tensor.dtype)


@pytest.mark.parametrize(
    ("sources", "positions", "name", "sure"),
    [
        (("k.1",), (9,), "stray_write", "likely"),
        (("k.1", "v.1"), (3, 4, 5, 8), "one_layer", "likely"),
        (("v.0", "v.1", "v.2", "v.3"), (3, 4, 9), "one_half", "likely"),
        (("k.0", "v.0", "k.1", "v.1", "k.2", "v.2", "k.3", "v.3"), (2, 6, 10, 14), "every_nth", "likely"),
    ],
)
def test_where_the_damage_is(served, sources, positions, name, sure):
    """Bytes that nobody knows, in a pattern of slots, layers and halves."""
    guarded, one, _ = served
    for source in sources:
        noise(rows(guarded, source), [one.slots[p] for p in positions])
    _, diagnosis = first(guarded)
    assert (diagnosis.name, diagnosis.sure) == (name, sure)


def test_a_draft_that_was_left_behind(served):
    """The request reads its own slot, with a token that it has no more."""
    guarded, one, _ = served
    one.tokens[18] = 99
    guarded.decode()
    guarded.canary.drain()
    (incident,) = guarded.canary.incidents
    assert incident.root.kind is Kind.TOKEN
    assert incident.diagnoses[0].name == "rolled_back"


def test_a_stale_table(served):
    """An entry names another request's slot, and the right one is intact elsewhere."""
    guarded, one, two = served
    right = one.slots[6]
    one.slots[6] = two.slots[7]
    _, diagnosis = first(guarded)
    assert (diagnosis.name, diagnosis.sure) == ("stale_table", "likely")
    assert f"intact in slot {right}" in " ".join(diagnosis.evidence)


def test_positions_that_are_off(served):
    """Entries of one request in a wrong order."""
    guarded, one, _ = served
    one.slots[5:9] = [*one.slots[6:9], one.slots[5]]
    _, diagnosis = first(guarded)
    assert diagnosis.name == "wrong_position"


def test_without_a_diagnosis_nothing_is_looked_at(served):
    """CANARY_DIAGNOSE=false: the incident is told, the device is not asked."""
    guarded = Guarded(read_check=-1, diagnose=False)
    request = guarded.submit(tokens=12)
    guarded.step(8)
    rows(guarded, "k.0")[request.slots[2]] += 1
    guarded.step(4)
    guarded.canary.drain()
    assert len(guarded.findings.told("incident")) == 1
    assert guarded.findings.told("diagnosis") == []


def test_a_look_that_fails_is_told_and_harms_nobody(served, monkeypatch):
    """Canary stays on, and the incident stands."""
    guarded, one, _ = served

    def fail(*args):
        raise RuntimeError("no memory")

    monkeypatch.setattr("canary_desk.incidents.investigator.take", fail)
    rows(guarded, "k.0")[one.slots[2]] += 1
    guarded.decode()
    guarded.canary.drain()
    (event,) = guarded.findings.told("diagnosis_failed")
    assert "no memory" in event.fields["error"]
    assert guarded.canary.enabled
    assert len(guarded.findings.told("incident")) == 1


def test_what_is_certain_of_an_arrival_is_named():
    """A load that brought nothing to memory that held something else."""
    tier = HostTier.make()
    prompt = list(range(5, 22))
    tier.save(tier.compute(prompt))
    _, arrival = tier.claim(prompt)
    tier.g.canary.ledger.arrive(arrival)
    tier.g.canary.drain()
    (incident,) = tier.g.canary.incidents
    (diagnosis,) = incident.diagnoses
    assert (incident.root.kind, diagnosis.name, diagnosis.sure) == (Kind.ARRIVAL, "load_undone", "certain")


def test_what_a_connector_brought_back_wrong_is_named():
    """By the ledger: bytes that are not those that were stored. No forward has read them yet."""
    tier = HostTier.make()
    prompt = list(range(5, 22))
    tier.save(tier.compute(prompt))
    tier.load(prompt, lambda block, source, data: data * 2 if (block, source) == (2, 1) else data)
    tier.g.canary.drain()
    (incident,) = tier.g.canary.incidents
    (diagnosis,) = incident.diagnoses
    assert (incident.root.kind, diagnosis.name, diagnosis.sure) == (Kind.ARRIVAL, "load_back", "likely")
    assert "1 of 4 sources differs: layer 0 V" in diagnosis.evidence[0]


def all_of(guarded):
    """Names and certainties of all diagnoses of the only incident, after one more forward."""
    incident, _ = first(guarded)
    return [(d.name, d.sure) for d in incident.diagnoses]


@pytest.mark.parametrize(
    ("bits", "diagnoses"),
    [
        (0x10, [("flipped_bit", "certain"), ("stray_write", "likely")]),
        (0x18, [("flipped_bit", "likely"), ("stray_write", "likely"), ("overwritten_word", "possible")]),
        (0xF6, [("flipped_bit", "likely"), ("stray_write", "likely"), ("overwritten_word", "possible")]),
    ],
)
def test_bits_of_one_byte_flipped(served, bits, diagnoses):
    """One bit is certain; of several it is said that a write of a few bytes may have done it, too."""
    guarded, one, _ = served
    rows(guarded, "k.1").view(torch.uint8)[one.slots[3], 9] ^= bits
    assert all_of(guarded) == diagnoses


def test_pages_that_were_exchanged_with_one_that_nobody_reads(served):
    """The other one's request is gone, and no forward compares its bytes; the evidence does."""
    guarded, one, two = served
    a, b = one.slots[4:8], two.slots[4:8]
    guarded.engine.requests.remove(two)
    for tensor in (*guarded.engine.k, *guarded.engine.v):
        tensor[a], tensor[b] = tensor[b].clone(), tensor[a].clone()
    incident, diagnosis = first(guarded)
    assert incident.total == 32
    assert (diagnosis.name, diagnosis.sure) == ("swapped", "certain")


def test_kv_whose_owner_has_changed_too_is_not_certainly_overwritten(served):
    """The bytes are another slot's, which does not have them any more: more happened than one copy."""
    guarded, one, two = served
    guarded.engine.requests.remove(two)
    for tensor in (*guarded.engine.k, *guarded.engine.v):
        tensor[one.slots[4:8]] = tensor[two.slots[10:14]].clone()
        noise(tensor, two.slots[10:14])
    _, diagnosis = first(guarded)
    assert (diagnosis.name, diagnosis.sure) == ("overwritten", "likely")


class Told(Guarded):
    """A toy engine that tells its allocator's events, as a plugin would."""

    def start(self, name, tokens, steps=3):
        """A request of ``tokens`` that has been computed."""
        request = self.engine.submit(name, tokens)
        for _ in range(steps):
            self.forward()
        return request

    def forward(self, change=lambda batch: None):
        """A forward; each slot is told as handed out to its request. ``change``: of the batch."""
        had = {request.name: len(request.slots) for request in self.engine.requests}
        batch = self.engine.batch()
        for request in self.engine.requests:
            self.tell("alloc", request.slots[had[request.name] :], request)
        change(batch)
        self.canary.step.before(batch)
        self.engine.forward(batch)
        self.canary.step.after(batch)
        self.canary.step.end()

    def decode(self):
        for request in self.engine.requests:
            request.tokens.append(8)
        self.forward()

    def tell(self, event, slots, request):
        """An event of the allocator, of ``slots`` of a request."""
        if slots:
            of = self.engine.writers.id(request.name)
            getattr(self.canary.slots, event)("full", torch.tensor(slots), of)


@pytest.fixture
def told():
    """An engine with two requests of 20 tokens, whose events are told."""
    guarded = Told(ToyEngine(layers=4), read_check=-1)
    return guarded, guarded.start("a", list(range(5, 25))), guarded.start("b", list(range(40, 60)))


def test_a_slot_that_was_handed_out_as_all_are_was_not_handed_out_twice(told):
    """A table entry of a shared prefix names another slot. Each slot is handed out right before it is written."""
    guarded, _, two = told
    guest = guarded.engine.submit("guest", two.tokens[:18], two, 12)
    guarded.tell("share", two.slots[:12], guest)
    guest.slots[5] = two.slots[9]
    assert all_of(guarded) == [("stale_table", "likely"), ("foreign_prefix", "possible")]


def test_a_slot_that_was_given_back_while_it_was_in_use(told):
    """And handed out to somebody else, who wrote it: the first one has had it."""
    guarded, one, two = told
    lost = one.slots[6]
    guarded.tell("free", [lost], one)
    guarded.engine.free.insert(0, lost)
    guarded.engine.requests.remove(one)
    guarded.decode()
    guarded.engine.requests.insert(0, one)
    assert two.slots[-1] == lost
    assert all_of(guarded) == [("use_after_free", "likely"), ("stale_table", "possible")]


def test_a_slot_that_was_handed_out_again_and_is_not_written_yet(told):
    """A block that is used again: no prefix cache has to do with it."""
    guarded, one, two = told
    lost = one.slots[6]
    guarded.tell("free", [lost], one)
    guarded.tell("alloc", [lost], two)
    assert all_of(guarded) == [("use_after_free", "likely"), ("stale_table", "possible")]


def test_a_table_that_names_a_slot_of_somebody_who_has_not_written_it(told):
    """It is the wrong table, not the wrong length: the slot is another request's."""
    guarded, one, two = told
    ahead = guarded.engine.free.pop()
    guarded.tell("alloc", [ahead], two)
    one.cached += 1
    one.tokens.append(8)
    one.slots.append(ahead)
    assert all_of(guarded) == [("stale_table", "likely")]


def test_a_length_that_counts_what_was_never_written(told):
    """It is the wrong length, not the wrong table: the slot is the request's, and nothing behind it was written."""
    guarded, one, _ = told
    ahead = guarded.engine.free.pop()
    guarded.tell("alloc", [ahead], one)
    one.cached += 1
    one.tokens.append(8)
    one.slots.append(ahead)
    assert all_of(guarded) == [("wrong_length", "likely"), ("unwritten", "possible")]


def test_a_cache_that_was_cleared_and_keeps_its_length(told):
    """Its slots hold nothing, and the request counts them."""
    guarded, one, _ = told
    guarded.canary.slots.clear("full", torch.tensor(one.slots[12:]))
    assert all_of(guarded) == [("wrong_length", "likely")]


@pytest.mark.parametrize(("event", "diagnoses"), [("share", "unfilled_prefix"), ("alloc", "stale_table")])
def test_a_prefix_that_was_published_early(told, event, diagnoses):
    """Slots that nobody has written, and that the prefix cache gave; where it did not, nothing is said of it."""
    guarded, _, two = told
    ahead = [guarded.engine.free.pop() for _ in range(4)]
    guarded.tell("alloc", ahead, two)
    guest = guarded.engine.submit("guest", list(range(70, 78)))
    if event == "share":
        guarded.tell("share", ahead, guest)
    guest.slots, guest.cached = ahead, 4
    assert all_of(guarded) == [(diagnoses, "likely")]


@pytest.mark.parametrize(("own", "diagnoses"), [(True, "write_after_free"), (False, "wrong_write_slot")])
def test_a_write_to_a_freed_slot(told, own, diagnoses):
    """By somebody who had it, or who never did: then the address is wrong."""
    guarded, one, two = told
    gone = one.slots[-3:]
    guarded.tell("free", gone, one)
    guarded.engine.requests.remove(one)
    (two if not own else one).tokens.append(8)
    guarded.engine.requests = [one if own else two]
    if own:
        one.slots, one.cached = one.slots[:-3], one.cached - 3
        one.tokens = one.tokens[: one.cached + 1]
    guarded.engine.free.insert(0, gone[0])

    def forward():
        batch = guarded.engine.batch()
        guarded.canary.step.before(batch)
        guarded.engine.forward(batch)
        guarded.canary.step.after(batch)
        guarded.canary.step.end()

    forward()
    guarded.canary.drain()
    (incident,) = guarded.canary.incidents
    assert incident.root.kind is Kind.WRITE_AFTER_FREE
    assert (incident.diagnoses[0].name, incident.diagnoses[0].sure) == (diagnoses, "likely")
