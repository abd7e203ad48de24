"""The reference of attention against torch's own, and which deviation explains an output."""

import json
import math
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from canary_core import Attended, AttentionError, AttentionRule, Verification
from canary_core.watchers.recompute.attention import AttentionLook
from canary_core.watchers.recompute.reference import attention, errors

DIM, HEADS, KV_HEADS, SCALE = 16, 4, 2, 0.25


def given(count=80, first=0, seed=0, dtype=torch.float32):
    """Queries of ``count`` tokens, and keys and values of these and ``first`` ones before."""
    draw = torch.Generator().manual_seed(seed)
    shapes = (count, HEADS), (first + count, KV_HEADS), (first + count, KV_HEADS)
    return [torch.randn(*shape, DIM, generator=draw).to(dtype) for shape in shapes]


def seen(output, queries, keys, values, **more):
    """As an engine's forward."""
    return Attended(3, len(keys) - len(queries), queries, keys, values, output, **more)


def torchs(queries, keys, values, scale=SCALE, window=None):
    """By torch, with a mask."""
    at = torch.arange(len(keys))[None]
    own = torch.arange(len(queries))[:, None] + len(keys) - len(queries)
    mask = (at <= own) & (at > own - (window or len(keys) + 1))
    q, k, v = (tensor.transpose(0, 1) for tensor in (queries, keys, values))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True).transpose(0, 1)


def looked(rule, *forwards, rounding=2**-24):
    """The verdict on forwards of one sequence."""
    look = AttentionLook(3, rule, rounding)
    for one in forwards:
        look.see(one)
    return look.result(), look.doubt


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("first", [0, 33])
def test_it_is_torchs_attention(first, window):
    """Of groups of heads, behind a prefix, within a window."""
    tensors = given(first=first)
    right = attention(seen(None, *tensors), AttentionRule(SCALE, window))
    torch.testing.assert_close(right, torchs(*tensors, window=window), rtol=1e-5, atol=1e-6)


def test_cap_and_sinks_are_as_their_formulas():
    """Computed here once more for one query of one head, with all of its keys."""
    queries, keys, values = given()
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    out = attention(seen(None, queries, keys, values), AttentionRule(SCALE, None, 3.0, sinks))
    logits = [3.0 * math.tanh(float(queries[50, 2] @ key) * SCALE / 3.0) for key in keys[:51, 1]]
    weights = torch.tensor([*logits, 2.0]).softmax(0)[:-1]
    torch.testing.assert_close(out[50, 2], weights @ values[:51, 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_torch_computes_is_never_blamed(dtype):
    """Over seeds, in one forward and in several, in three types."""
    for seed in range(12):
        queries, keys, values = given(96, seed=seed, dtype=dtype)
        cuts = (0, 96) if seed % 2 else (0, 40, 41, 96)
        forwards = [
            seen(torchs(q, keys[:end], values[:end]), q, keys[:end], values[:end], computed=values[begin:end])
            for begin, end in pairwise(cuts)
            for q in [queries[begin:end]]
        ]
        found, doubt = looked(AttentionRule(SCALE), *forwards, rounding=torch.finfo(dtype).eps / 2)
        assert (doubt, found.differs, found.tokens) == (None, False, 96), found


def test_sums_over_thousands_of_keys_are_never_blamed():
    """A kernel in 32 bits that adds up one key after the other: the more keys there are, the more it rounds.
    A scale two thousandths off is told all the same."""
    queries, keys, values = given(40, first=6000)
    of = [head * KV_HEADS // HEADS for head in range(HEADS)]

    def summed(scale):
        total, sizes = torch.zeros(40, HEADS, DIM), torch.zeros(40, HEADS, 1)
        for at, (key, value) in enumerate(zip(keys[:, of], values[:, of], strict=True)):
            weights = ((queries * key).sum(2, keepdim=True) * scale).exp()
            weights[: max(at - 6000, 0)] = 0
            total += weights * value
            sizes += weights
        return total / sizes

    right, _ = looked(AttentionRule(SCALE, None), seen(summed(SCALE), queries, keys, values))
    assert not right.differs, right
    wrong, _ = looked(AttentionRule(SCALE, None), seen(summed(1.002 * SCALE), queries, keys, values))
    assert wrong.differs, wrong


def broken(name):
    """An output, and the text that says what of it is wrong; the rule says a window of 40 where there is one."""
    queries, keys, values = given()
    if name == "scale":
        return torchs(queries, keys, values, SCALE * 1.02), None, "that of the scale 0.255,"
    if name == "window":
        return torchs(queries, keys, values, window=41), 40, "that of a window of 41,"
    if name == "no window":
        return torchs(queries, keys, values), 40, "that of no window"
    if name == "head":
        return (
            torchs(queries, keys.flip(1), values.flip(1)),
            None,
            "that of head 0 of the keys, and the head's own is 1",
        )
    if name == "values":
        return torchs(queries, values, keys), None, "that of keys and values exchanged"
    noisy = torchs(queries, keys, values)
    noisy[60:, 1] *= 1.1
    return noisy, None, "head 1 is off by 0.1"


@pytest.mark.parametrize("name", ["scale", "window", "no window", "head", "values", "noise"])
def test_a_deviation_is_told_by_name(name):
    """With the first position and the head."""
    output, window, text = broken(name)
    found, _ = looked(AttentionRule(SCALE, window), seen(output, *given()))
    assert found.deviation == {"noise": "unknown", "no window": "window"}.get(name, name)
    assert text in found.detail
    if name == "noise":
        assert (found.head, found.position) == (1, 60)
    if "window" in name:
        assert found.position >= 40


@pytest.mark.parametrize("name", ["values", "keys"])
def test_values_and_keys_that_the_layer_has_not_computed_are_told(name):
    """Whatever attention makes of them: one number is another."""
    queries, keys, values = given()
    computed = {"computed": values.clone(), "computed_keys": keys.clone()}
    computed["computed" if name == "values" else "computed_keys"][70, 1, 3] += 1
    found, _ = looked(AttentionRule(SCALE), seen(torchs(queries, keys, values), queries, keys, values, **computed))
    assert (found.deviation, found.position) == (name, 70)


def test_compressed_kv_that_the_layer_has_not_computed_is_told():
    """Whatever attention makes of keys and values; in one forward with more heads of keys than in the next."""
    queries, keys, values = given()
    whole = [part[:40] for part in (queries, keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1))]
    rows = torch.randn(40, 6)
    for changed in (False, True):
        stored = rows.clone()
        stored[33, 2] += changed
        first = seen(torchs(*whole), *whole, compressed=(stored, rows))
        then = seen(torchs(queries[40:], keys, values), queries[40:], keys, values)
        found, _ = looked(AttentionRule(SCALE), first, then)
        told = "keys", 33, "the cache holds other compressed KV than the layer has computed"
        assert (found.deviation, found.position, found.detail) == (told if changed else (None, None, None))
        assert found.tokens == 80


def test_the_last_tokens_are_enough():
    """Positions count from the first token of the sequence; a gap is no verdict."""
    queries, keys, values = given()
    output = torchs(queries, keys, values)
    output[60:, 1] *= 1.1
    found, _ = looked(AttentionRule(SCALE), seen(output[30:], queries[30:], keys, values))
    assert (found.position, found.tokens) == (60, 50)
    gap = seen(output[50:], queries[50:], keys, values)
    early = seen(output[:40], queries[:40], keys[:40], values[:40])
    assert looked(AttentionRule(SCALE), early, gap) == (None, "attention went on at position 50, behind 40")


def test_numbers_that_are_not_finite_are_not_judged():
    """A model may compute them."""
    queries, keys, values = given()
    values[20, 0, 0] = math.inf
    odd = seen(torchs(queries, keys, values), queries, keys, values, computed=values)
    assert looked(AttentionRule(SCALE), odd) == (None, "its numbers are not finite")


def test_what_can_not_be_judged_has_a_reason():
    """Nothing was seen, too little, or other keys than those of all tokens so far."""
    queries, keys, values = given()
    output = torchs(queries, keys, values)
    assert looked(AttentionRule(SCALE)) == (None, "fewer than 32 tokens were seen by its attention")
    few = seen(output[:9], queries[:9], keys[:9], values[:9])
    assert looked(AttentionRule(SCALE), few) == (None, "fewer than 32 tokens were seen by its attention")
    padded = Attended(3, 0, queries[:40], keys, values, output[:40])
    assert looked(AttentionRule(SCALE), padded) == (None, "attention got 80 keys at position 40, 2 heads of 4")


def test_zeros_are_equal_to_zeros_and_nothing_else():
    """Padded heads have no size to be divided by."""
    zeros = torch.zeros(2, 3, 4)
    assert torch.equal(errors(zeros, zeros), torch.zeros(3, 2))
    assert bool(errors(zeros + 1, zeros).isinf().all())


@pytest.mark.parametrize("worst", [0.25, float("inf")])
def test_a_verdict_on_attention_comes_through_json(worst):
    """As `canary ctl verify` reads it, in a table with the head."""
    found = AttentionError(1, 2, tokens=40, median=0.1, worst=worst, bound=0.2, deviation="scale", position=3)
    answer = Verification("a", 40, "differs", attention=found)
    read = Verification.from_dict(json.loads(json.dumps(answer.to_dict())))
    assert read.attention == found
    assert "attention of layer 1, head 2" in read.table()
    assert read.table().endswith("<-- differs")
