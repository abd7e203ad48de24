"""`Identities`: a prefix hit across LoRA adapters, cache salts or extra keys is a finding, and told as what it is."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.guarded import Guarded

from canary_core import Kind
from canary_core.ops import hashing
from canary_core.runtime.identities import NONE, Identities

X, Y = "b1ba07e5", "65945879"
"""Digests of these letters."""
TEXTS = st.one_of(st.none(), st.text(max_size=12))


def step(guarded: Guarded, *identities: dict[str, str]) -> None:
    """A forward whose requests have these identities, in order."""
    known = guarded.engine.writers.identities
    batch = replace(guarded.engine.batch(), anchors=torch.tensor([known.anchor(**i) for i in identities]))
    guarded.canary.step.before(batch)
    guarded.engine.forward(batch)
    guarded.canary.step.after(batch)
    guarded.canary.step.end()


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({"lora": "sql"}, {"lora": "law"}, ("LoRA adapter sql", "LoRA adapter law")),
        ({"lora": "sql"}, {}, ("LoRA adapter sql", NONE)),
        ({}, {"lora": "sql"}, (NONE, "LoRA adapter sql")),
        ({"cache_salt": "x"}, {"cache_salt": "y"}, (f"cache salt #{X}", f"cache salt #{Y}")),
        ({"extra_key": "x", "lora": "sql"}, {"lora": "sql"}, (f"LoRA adapter sql, extra key #{X}", "LoRA adapter sql")),
    ],
)
def test_a_prefix_hit_across_identities_is_one_finding_that_names_both(one, other, said):
    """Tokens and positions are all right; nothing but the identity is not. What a later token finds is the same."""
    guarded = Guarded()
    first = guarded.submit("first", 6)
    step(guarded, one)
    guarded.engine.submit("second", [*first.tokens, 9], shared=first, prefix=6)
    first.tokens.append(8)
    step(guarded, one, other)
    guarded.engine.requests[1].tokens.append(8)
    first.tokens.append(8)
    step(guarded, one, other)
    guarded.canary.drain()
    (found,) = guarded.violations
    assert (found.kind, found.position, found.slot) == (Kind.PREFIX, 0, first.slots[0])
    assert (found.request, found.stored_request, found.step_written) == ("second", "first", 1)
    assert (found.stored_identity, found.identity) == said
    (incident,) = guarded.canary.incidents
    assert (incident.diagnoses[0].name, incident.diagnoses[0].sure) == ("foreign_prefix", "certain")
    assert f"was computed for {said[0]}" in " ".join(incident.diagnoses[0].evidence)


def test_within_one_identity_nothing_is_found():
    """Prefix hits, chunks and decodes of two identities in the same batches."""
    guarded = Guarded()
    a, b = {"lora": "a"}, {"lora": "b"}
    one = guarded.submit("one", 12)
    two = guarded.engine.submit("two", one.tokens)
    for _ in range(2):
        step(guarded, a, b)
    guarded.engine.submit("three", [*one.tokens, 9], shared=one, prefix=12)
    guarded.engine.submit("four", [*two.tokens, 9], shared=two, prefix=12)
    for request in (one, two):
        request.tokens.append(8)
    step(guarded, a, b, a, b)
    guarded.canary.drain()
    assert guarded.violations == []


def test_a_forgotten_identity_is_still_another_one():
    """Only the name of whoever wrote it is gone."""
    guarded = Guarded()
    guarded.engine.writers.identities = Identities(capacity=1)
    first = guarded.submit("first", 4)
    step(guarded, {"lora": "a"})
    guarded.engine.submit("second", [*first.tokens, 9], shared=first, prefix=4)
    guarded.engine.requests.remove(first)
    step(guarded, {"lora": "b"})
    guarded.canary.drain()
    (found,) = guarded.violations
    assert (found.identity, found.stored_identity) == ("LoRA adapter b", None)
    assert "for another identity: an identity whose name is not known; second has LoRA adapter b" in found.explanation


def test_a_foreign_prefix_is_no_matter_of_identity():
    """The hash of its first token is what it should be."""
    guarded = Guarded()
    first = guarded.submit("first", 4)
    step(guarded, {})
    other = guarded.engine.submit("other", [*first.tokens[:2], 77, 78])
    first.tokens.append(8)
    step(guarded, {}, {})
    other.slots[2], other.slots[3] = first.slots[2], first.slots[3]
    first.tokens.append(8)
    other.tokens.append(8)
    step(guarded, {}, {})
    guarded.canary.drain()
    assert guarded.violations
    assert all(v.identity is None and v.stored_identity is None for v in guarded.violations)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_identities_differ_where_any_part_does(lora, salt, key, other):
    """And only there, in every process; words never hold a salt or a key."""
    known, again = Identities(), Identities()
    anchor = known.anchor(lora=lora, cache_salt=salt, extra_key=key)
    assert again.anchor(lora=lora, cache_salt=salt, extra_key=key) == anchor
    assert (known.anchor(lora=lora, cache_salt=other, extra_key=key) == anchor) == (other == salt)
    assert (known.anchor(lora=lora, cache_salt=salt, extra_key=other) == anchor) == (other == key)
    assert known.anchor() == hashing.COMMON_ANCHOR
    name = known.name(anchor)
    assert (name == NONE) == (lora is None and salt is None and key is None)
    told = name.replace(str(lora), "")
    assert all(secret is None or len(secret) < 9 or secret not in told for secret in (salt, key))


def test_only_the_last_identities_are_remembered():
    """A salt for each request must not fill the memory."""
    known = Identities(capacity=3)
    anchors = [known.anchor(cache_salt=str(i)) for i in range(4)]
    known.anchor(cache_salt="1")
    anchors.append(known.anchor(cache_salt="4"))
    assert [known.name(a) is None for a in anchors] == [True, False, True, False, False]
    assert known.anchor(cache_salt="0") == anchors[0]


def test_one_number_is_mixed_as_tensors_are():
    """What finds out an identity reverses what the device did."""
    tokens = torch.tensor([0, 1, 151643, (1 << 31) - 1, 7])
    positions = torch.tensor([0, 0, 5, 100000, 1 << 20])
    mixed = [hashing.mixed(t, p) for t, p in zip(tokens.tolist(), positions.tolist(), strict=True)]
    assert mixed == hashing.mix(tokens, positions).tolist()
    value = torch.tensor(hashing.COMMON_ANCHOR)
    for byte in b"sql\0":
        value = hashing.splitmix(value ^ byte)
    assert hashing.anchor("sql") == int(value)
