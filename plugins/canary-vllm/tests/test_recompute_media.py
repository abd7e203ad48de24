"""Requests with media in the place of tokens, computed again on a real vLLM: clean ones are well; another sound's KV,
and another sound's output of the encoder, are told."""

from typing import Any

import pytest
from canary_vllm.hooks import HOOKS
from vllm_on_cpu import guarded
from vllm_on_cpu.listener import AT, Listener

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("contents")]
QUIET = dict(read_check=0, scrub_budget="0", bytes="off")
TEXT = [*range(5, 75)]
"""With a sound more than a step may compute."""


@pytest.fixture(scope="module")
def small() -> Listener:
    """One for all tests."""
    return Listener()


def serve(small: Listener, sounds: dict[str, int], text: list[int] = TEXT) -> dict[str, list[int]]:
    """One request after the other."""
    done = {}
    for name, sound in sounds.items():
        small.ask(name, sound, text, 50)
        done |= small.run()
    return done


def learn(small: Listener) -> None:
    """Texts without anything in common: 16 that are equal bit for bit, or 8 that are not, and more until the noise is
    known."""
    (session,) = HOOKS.sessions
    for turn in range(48):
        if turn >= 20 and session.recomputed.judge.noise.known:
            return
        serve(small, {f"fresh {turn}": 100 + turn}, [turn * 3 + 7, *range(3 + turn, 73 + turn)])
    raise AssertionError("the noise is not known after 48 requests")


def told(guard: Any) -> list[Any]:
    """Findings by a second computation: layer, position, request without vLLM's digits, rule."""
    guard.canary.drain()
    found = [v for v in guard.findings.violations if v.kind.name == "RECOMPUTE"]
    return [(v.layer, v.position, str(v.request).partition("-")[0], v.rule) for v in found]


def test_clean_traffic_is_well_and_answers_stay_the_same(small):
    """The same sound by a hit, and another one, in chunks."""
    small.renew()
    sounds = {f"{turn}": sound for turn, sound in enumerate((1, 2, 1, 3, 2, 1))}
    plain = serve(small, sounds)
    with guarded.guard(small, **QUIET, recompute="100%") as guard:
        learn(small)
        assert serve(small, sounds) == plain
        (session,) = HOOKS.sessions
        answers = list(session.recomputed.answers)
        assert {answer.verdict for answer in answers[-6:]} == {"same"}
        assert [one for one in guard.trouble() if not one.startswith("unjudged ")] == []
        assert not any("canary" in str(key) for key in small.scheduler.encoder_cache_manager.request_cached_ids)


def test_a_hit_across_sounds_is_told(small, monkeypatch):
    """vLLM's hash of blocks forgets the media."""
    from vllm.v1.core import kv_cache_utils

    with guarded.guard(small, **QUIET, recompute="100%") as guard:
        learn(small)
        monkeypatch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", lambda _, __, ___, index: (None, index))
        serve(small, {"well": 1, "ill": 2})
        assert {(layer, position, name) for layer, position, name, _ in told(guard)} == {(0, AT, "ill")}
        assert {rule for *_, rule in told(guard)} == {"brought"}


def test_another_sounds_output_of_the_encoder_is_told(small):
    """What vLLM keeps of the encoder for the next request with that sound is another one's."""
    with guarded.guard(small, **QUIET, recompute="100%") as guard:
        learn(small)
        one, other = (small.ask(name, sound, TEXT, 50) for name, sound in (("one", 1), ("other", 2)))
        first, second = (small.scheduler.requests[name].mm_features[0].identifier for name in (one, other))
        small.run()
        small.runner.encoder_cache[second] = small.runner.encoder_cache[first].clone()
        serve(small, {"ill": 2}, [9, *TEXT])
        assert {(layer, position, name) for layer, position, name, _ in told(guard)} == {(0, AT, "ill")}
