"""What is certain whoever stores at an origin: nothing came, not all came, another sequence's or identity's KV came.
And what looks like it and is right."""

from dataclasses import replace

import pytest
import torch
from ledger.host_tier import PAGE, HostTier
from support.toy import ToyEngine

from canary_core import Arrival, Kind, Origin
from canary_core.ops.hashing import COMMON_ANCHOR
from canary_core.runtime.identities import CHANGES

OTHERS = Origin("tier", shared=True)
ALICE = list(range(5, 22))
BOB = list(range(60, 77))


def told(tier):
    """What was found: rule, position, and who left or computed the bytes."""
    tier.g.canary.drain()
    assert {v.kind for v in tier.g.violations} <= {Kind.ARRIVAL}
    found, tier.g.violations[:] = [(v.rule, v.position, v.stored_request) for v in tier.g.violations], []
    return found


def tier_of_two():
    """An engine with 20 slots, whose tier has both prompts; the slots that are handed out next were alice's."""
    tier = HostTier.make(engine=ToyEngine(slots=64), origin=OTHERS)
    for name, prompt in (("bob", BOB), ("alice", ALICE)):
        request = tier.compute(prompt, name)
        tier.save(request, keep=False)
        tier.finish(request)
    use_again(tier, request)
    return tier


def use_again(tier, request):
    """The slots of ``request`` are handed out next, in the same order."""
    tier.g.engine.free.sort(key=lambda slot: (slot not in request.slots, slot))


def load(tier, prompt, fault=None, expected=True, name="again"):
    """Brings the prompt's blocks, announced or not; ``fault`` as of `HostTier.copy`, "nothing" for no copy."""
    request, arrival = tier.claim(prompt, name)
    if expected:
        tier.g.canary.ledger.expect(arrival)
    if fault != "nothing":
        tier.copy(request, fault)
    tier.g.canary.ledger.arrive(arrival)
    tier.g.step()
    return request


@pytest.mark.parametrize("expected", [True, False])
def test_a_load_that_brings_nothing_is_told(expected):
    """Each block, with the request whose bytes are still there."""
    tier = tier_of_two()
    load(tier, BOB, "nothing", expected)
    assert told(tier) == [("nothing_came", p, "alice") for p in range(0, 16, PAGE)]
    assert tier.counts("nothing_came", "unknown") == [4, 0]


@pytest.mark.parametrize("expected", [True, False])
def test_memory_that_nobody_wrote_is_nothing_too(expected):
    """The pool is as it was at the start."""
    tier = HostTier.make(engine=ToyEngine(slots=64), origin=OTHERS)
    load(tier, BOB, "nothing", expected)
    assert told(tier) == [("nothing_came", p, None) for p in range(0, 16, PAGE)]


def test_a_layer_that_is_left_out_is_named():
    """Layers that come, and one that does not."""
    tier = tier_of_two()
    tensors = tier.tensors
    before = {s: tensors[s].clone() for s in (2, 3)}
    request, arrival = tier.claim(BOB)
    tier.g.canary.ledger.expect(arrival)
    tier.copy(request)
    for source, bytes_ in before.items():
        tensors[source].copy_(bytes_)
    tier.g.canary.ledger.arrive(arrival)
    tier.g.step()
    tier.g.canary.drain()
    assert {(v.rule, v.sources) for v in tier.g.violations} == {("left_out", ("k.1", "v.1"))}
    assert tier.g.violations[0].detail == "positions 0 to 3; 2 of 4 sources are as before the load: layer 1 K and V"


def test_the_very_same_prefix_may_lie_there():
    """The bytes of its blocks are those from before, and right: whether they were brought or not."""
    tier = tier_of_two()
    for name, fault in (("copied", None), ("not copied", "nothing")):
        request = load(tier, ALICE, fault, name=name)
        tier.finish(request)
        use_again(tier, request)
    assert told(tier) == []


def test_one_finding_makes_no_right_load_wrong():
    """After a load that brought nothing, and bytes under the wrong name in the pool, right loads are silent."""
    tier = tier_of_two()
    tier.finish(load(tier, BOB, "nothing"))
    assert len(told(tier)) == 4
    for turn, prompt in enumerate((ALICE, BOB) * 3):
        tier.finish(load(tier, prompt, name=f"turn {turn}"))
    assert [rule for rule, _, _ in told(tier) if rule != "nothing_came"] == []


def test_another_sequences_blocks_are_told_by_what_they_are():
    """Blocks that this engine computed, whoever stores at the origin; to no block of the same place, too."""
    tier = HostTier.make(origin=OTHERS)
    for name, prompt in (("alice", ALICE), ("bob", BOB)):
        request = tier.compute(prompt, name)
        tier.save(request)
        tier.finish(request)
    third = tier.stored[tuple(BOB[: 3 * PAGE])]
    tier.load(ALICE, lambda block, source, data: third[source] if block == 1 else data)
    tier.g.canary.drain()
    (one,) = tier.g.violations
    assert (one.rule, one.position, one.stored_request, one.stored_position) == ("another_sequence", 4, "bob", 8)
    assert one.explanation.endswith("positions 4 to 7; these are positions 8 to 11 of bob.")
    assert tier.counts("matched", "another_sequence") == [3, 1]


class Adapters:
    """An engine whose requests have the adapter of their name's first word, and a tier that is asked by tokens only.
    ``noticed``: whether bob's adapter counts in what is computed."""

    def __init__(self, origin, noticed=True):
        self.tier = HostTier.make(origin=origin)
        self.engine = self.tier.g.engine
        self.noticed, self._forward = noticed, self.engine.forward
        self.engine.forward = self.forward

    def forward(self, batch):
        self._forward(batch)
        if self.noticed and self.engine.requests[0].name.startswith("bob"):
            for tensor in self.tier.tensors:
                tensor[batch.tables["full"].write_slots.long()] *= 1.5

    def anchor(self, name):
        writers = self.engine.writers
        writers.identify(name, lora=name.split()[0])
        return writers.anchor(name)

    def compute(self, name, prompt):
        batch, anchor = self.engine.batch, self.anchor(name)
        rows = torch.tensor([anchor])
        self.engine.batch = lambda **kwargs: replace(batch(**kwargs), anchors=rows)
        request = self.tier.compute(prompt, name)
        self.engine.batch = batch
        self.tier.save(request)
        self.tier.finish(request)

    def bring(self, name, prompt):
        request, arrival = self.tier.claim(prompt, name)
        self.tier.copy(request)
        self.tier.g.canary.ledger.arrive(replace(arrival, anchor=self.anchor(name)))
        self.tier.g.canary.drain()
        self.tier.finish(request)

    def told(self):
        found = [(v.rule, v.request, v.stored_request, v.identity, v.stored_identity) for v in self.tier.g.violations]
        self.tier.g.violations.clear()
        return sorted(set(found))


CROSSED = ("another_identity", "bob 2", "alice 1", "LoRA adapter bob", "LoRA adapter alice")


def test_the_same_tokens_under_another_adapter_are_told_where_both_are_known_to_differ():
    """The engine has computed some tokens with both, and not to the same bytes."""
    adapters = Adapters(OTHERS)
    adapters.compute("bob 0", BOB)
    adapters.compute("alice 0", BOB)
    adapters.compute("alice 1", ALICE)
    adapters.bring("bob 2", ALICE)
    assert adapters.told() == [CROSSED]


@pytest.mark.parametrize("common", [False, True])
def test_identities_that_may_compute_the_same_are_no_finding(common):
    """A salt changes nothing in what is computed, and an adapter need not: as long as nothing shows that, or where the
    same bytes came of the same tokens, the KV may well be another engine's, and right."""
    adapters = Adapters(OTHERS, noticed=False)
    if common:
        adapters.compute("bob 0", BOB)
        adapters.compute("alice 0", BOB)
    adapters.compute("alice 1", ALICE)
    adapters.bring("bob 2", ALICE)
    assert adapters.told() == []
    assert adapters.tier.counts("another_identity", "unknown") == [0, 4]


class Trained(Adapters):
    """The same, where nothing but the weights tells requests apart."""

    def anchor(self, name):
        self.engine.writers.identify(name)
        return self.engine.writers.anchor(name)

    def train(self):
        self.tier.g.canary.drain()
        self.tier.g.canary.step.weights_changed("reload_weights")


OLD = ("another_identity", "bob 2", "alice 1", "the weights of change 1 (reload_weights)", "the weights of the start")


def test_a_tier_that_brings_older_weights_kv_is_told_with_the_update():
    """A tier of this engine alone, asked by tokens: nobody has emptied it. Said of the request that began after the
    change; one from before gets what it would have computed."""
    trained = Trained(Origin("tier"))
    trained.compute("alice 1", ALICE)
    early = trained.anchor("early")
    trained.train()
    trained.bring("bob 2", ALICE)
    assert trained.told() == [OLD]
    request, arrival = trained.tier.claim(ALICE, "early")
    trained.tier.copy(request)
    trained.tier.g.canary.ledger.arrive(replace(arrival, anchor=early))
    trained.tier.g.canary.drain()
    assert trained.told() == []


def test_where_others_store_older_weights_kv_is_no_finding():
    """The change may be of no consequence for these tokens, and another engine may have stored the same bytes since."""
    trained = Trained(OTHERS)
    trained.compute("alice 0", BOB)
    trained.compute("alice 1", ALICE)
    trained.train()
    trained.compute("bob 0", BOB)
    trained.bring("bob 2", ALICE)
    assert trained.told() == []


def test_what_may_have_been_computed_with_the_new_weights_is_no_finding():
    """It came to the ledger after the change."""
    trained = Trained(Origin("tier"))
    trained.train()
    batch = trained.engine.batch
    rows = torch.tensor([COMMON_ANCHOR])
    # A request that began before the change and ran on.
    trained.engine.batch = lambda **kwargs: replace(batch(**kwargs), anchors=rows)
    request = trained.tier.compute(ALICE, "alice 1")
    trained.engine.batch = batch
    trained.tier.save(request)
    trained.tier.finish(request)
    trained.bring("bob 2", ALICE)
    assert trained.told() == []


def test_a_change_that_is_noticed_late_is_not_dated_back():
    """Parameters changed in place, and a forward ran before anybody looked: it may have computed with the new ones."""
    trained = Trained(Origin("tier"))
    trained.compute("alice 1", ALICE)
    trained.tier.g.canary.drain()
    trained.tier.g.canary.step.weights_changed("in place", since=1)
    trained.bring("bob 2", ALICE)
    assert trained.told() == []


def test_weights_that_change_in_every_step_raise_nothing_of_their_own():
    """As a trainer does, with a tier that is emptied each time; KV from before the remembered changes is not judged."""
    trained = Trained(Origin("tier"))
    identities = trained.engine.writers.identities
    trained.compute("alice 1", ALICE)
    trained.tier.g.canary.drain()
    stored = dict(trained.tier.stored)
    for number in range(CHANGES + 8):
        identities.change_weights("train", trained.tier.g.canary.forwards)
        if number % 256 == 0:
            trained.tier.stored.clear()
            trained.compute(f"alice {number}", ALICE)
            trained.bring(f"bob {number}", ALICE)
    assert trained.told() == []
    trained.tier.stored = stored
    trained.bring("bob", ALICE)
    assert [found[0] for found in trained.told()] == ["another_identity"]
    assert len(identities._changes) == CHANGES


def test_a_hit_across_identities_leaves_a_private_origin_private():
    """Nobody else stores there, so a prefix that was never kept is what was stored for another one: a finding, and no
    sign that others store there. What comes back wrong afterwards is found as before."""
    adapters = Adapters(Origin("tier"))
    adapters.compute("alice 1", ALICE)
    adapters.bring("bob 2", ALICE)
    assert adapters.told() == [CROSSED]
    assert "ledger_shared" not in [e.name for e in adapters.tier.g.findings.events]
    stored = adapters.tier.stored[tuple(ALICE[:PAGE])]
    stored[0] = stored[0] + 1
    adapters.bring("alice 3", ALICE)
    assert [v.rule for v in adapters.tier.g.violations] == [None]


def test_the_same_tokens_at_the_same_place_may_have_the_same_bytes():
    """After other tokens: what a model of one layer, or one that looks at the last tokens only, computes."""
    tier = HostTier.make(origin=OTHERS)
    request = tier.compute(ALICE, "alice")
    tier.save(request)
    tier.finish(request)
    other = [*BOB[:PAGE], *ALICE[PAGE:]]
    for block in range(1, 4):
        tier.stored[tuple(other[: (block + 1) * PAGE])] = tier.stored[tuple(ALICE[: (block + 1) * PAGE])]
    tier.stored[tuple(other[:PAGE])] = [t[:PAGE].clone() + 1 for t in tier.tensors]
    tier.finish(tier.load(other))
    assert told(tier) == []


def test_one_token_over_and_over_is_the_same_anywhere():
    """In a model without positions: blocks of other places have the same bytes."""
    tier = HostTier.make(origin=OTHERS)
    request = tier.compute([9] * 5, "short")
    tier.save(request)
    tier.finish(request)
    for block in range(4):
        tier.stored[(9,) * (PAGE * (block + 1))] = tier.stored[(9,) * PAGE]
    tier.load([9] * 17)
    assert told(tier) == []


def test_zeros_are_nobodys():
    """A block that was computed as zeros shows nothing about others."""
    tier = HostTier.make(origin=OTHERS)
    forward = tier.g.engine.forward

    def nothing(batch):
        forward(batch)
        for tensor in tier.tensors:
            tensor.zero_()

    tier.g.engine.forward = nothing
    tier.save(tier.compute(ALICE, "alice"))
    tier.g.canary.drain()
    tier.g.violations.clear()
    tier.g.engine.forward = forward
    for block in range(4):
        tier.stored[tuple(BOB[: (block + 1) * PAGE])] = tier.stored[tuple(ALICE[:PAGE])]
    request, arrival = tier.claim(BOB, "bob")
    for tensor in tier.tensors:
        tensor[tier.on_device(request.slots)] = 1
    tier.copy(request)
    tier.g.canary.ledger.arrive(arrival)
    assert [found for found in told(tier) if found[0] == "another_sequence"] == []


@pytest.mark.parametrize(("last", "found"), [(16, [12]), (13, [8])])
def test_a_window_need_not_bring_what_nobody_will_read(last, found):
    """Blocks before the window of the last token may stay as they are."""
    engine = ToyEngine(slots=128, window=3)
    tier = HostTier.make(engine=engine, origin=OTHERS)
    arrival = Arrival("window", torch.arange(40, 40 + last), ALICE[:last], OTHERS, PAGE)
    tier.g.canary.ledger.arrive(arrival)
    tier.g.canary.drain()
    assert [(v.rule, v.position) for v in tier.g.violations] == [("nothing_came", p) for p in found]


def test_what_is_remembered_is_bounded(monkeypatch):
    """Of very many blocks that never come the oldest are forgotten."""
    from canary_core.watchers.ledger import proofs

    monkeypatch.setattr(proofs, "MOST_BEFORE", 3)
    tier = tier_of_two()
    ledger = tier.g.canary.ledger
    ledger.remember("full", torch.arange(1, 41), PAGE)
    ledger.read(wait=True)
    ((_, of),) = ledger._regions.items()
    assert len(of._proofs._before) == 3
