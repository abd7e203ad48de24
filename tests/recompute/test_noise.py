"""Bounds of `Noise` from fresh requests that an engine can compute again by one path only."""

import pytest
import torch

from canary_core import KVSource, Role
from canary_core.watchers.recompute.noise import PAIRED_REQUESTS, Errors, Noise

TOKENS, USUAL, ROUNDING = 160, 0.01, 2.0**-9
STATE, KV = Role.STATE, Role.DATA


def source(role, layer=1, half="k"):
    """One with a name."""
    return KVSource(
        torch.zeros(4, 4), half, layer, chunk_bytes=16, slot_stride_bytes=16, dtype=torch.float32, role=role
    )


def learnt(role, far_tokens=1, exact=0):
    """Noise of requests whose tokens are off by about `USUAL`, and so many of each by 0.45; ``exact`` requests by
    single tokens alone."""
    noise, known, draw = Noise(ROUNDING), source(role), torch.Generator().manual_seed(3)
    for number in range(PAIRED_REQUESTS + exact):
        values = USUAL * (0.5 + torch.rand(1, TOKENS, generator=draw)) * (number >= exact)
        values[0, torch.randperm(TOKENS, generator=draw)[:far_tokens]] = 0.45
        noise.learn_pair([Errors("kv", [known], range(TOKENS), values)], decoded=40)
    return noise.bound("kv", known)


def test_single_tokens_that_are_far_off_do_not_hide_an_error_of_all():
    """The bound of a median is a multiple of medians; a single token may still be off by as much as one was."""
    bound = learnt(KV)
    assert 8 * USUAL < bound.window < 12 * USUAL
    assert bound.token == pytest.approx(0.9)
    assert bound.quarter == pytest.approx(0.9)


@pytest.mark.parametrize(("role", "far_tokens", "exact"), [(KV, 20, 0), (KV, 1, 1), (STATE, 1, 0)])
def test_single_tokens_bound_medians_where_these_say_too_little(role, far_tokens, exact):
    """Where more than a few tokens are far off, so that a window may have many; where a request had none that is off,
    so that another batch may round otherwise; and in states, of which one may be a hundred times as far off."""
    bound = learnt(role, far_tokens, exact)
    assert bound.window == pytest.approx(1.8 if role is STATE else 0.9)


@pytest.mark.parametrize(
    ("half", "layer", "roundings"),
    [("k", 0, 1), ("k", 1, 4), ("k", 4, 16), ("v", 16, 4 * 128**0.5), ("kv", 0, 1), ("kv", 1, 8)],
)
def test_a_few_roundings_of_paths_that_no_fresh_request_took_are_noise(half, layer, roundings):
    """Decodes of Gemma 3 in vLLM on an H200: off by a tenth of a rounding here and there up to some 500 tokens, by 1.7
    roundings in layer 1 behind, and the same in batches of 40."""
    noise, known = Noise(ROUNDING), source(KV, layer, half)
    for number in range(PAIRED_REQUESTS):
        values = torch.zeros(1, TOKENS)
        values[0, number::7] = ROUNDING / 10
        noise.learn_pair([Errors("kv", [known], range(TOKENS), values)], decoded=40)
    bound = noise.bound("kv", known)
    assert noise.known
    assert (bound.window, bound.token, bound.quarter) == pytest.approx([roundings * ROUNDING] * 3)


@pytest.mark.parametrize(
    ("half", "layer", "usual", "bound"),
    [
        ("k", 1, USUAL, 4 * USUAL), ("k", 1, ROUNDING / 10, 4 * ROUNDING), ("v", 16, ROUNDING, 16 * ROUNDING),
        ("kv", 4, ROUNDING, 16 * ROUNDING), ("v", 0, ROUNDING / 10, ROUNDING),
    ],
)  # fmt: skip
def test_where_all_tokens_are_off_another_path_may_be_four_times_as_far_off(half, layer, usual, bound):
    """Or a few roundings. The bound of a median, of a token and of a quarter of a window."""
    noise, known = Noise(ROUNDING), source(KV, layer, half)
    for _ in range(PAIRED_REQUESTS):
        noise.learn_pair([Errors("kv", [known], range(TOKENS), torch.full((1, TOKENS), usual))], decoded=40)
    found = noise.bound("kv", known)
    assert (found.window, found.token, found.quarter) == pytest.approx([bound] * 3)
