"""Requests with sounds or images in the place of tokens, computed again on a real vLLM: clean ones are well; another
sound's KV, and another sound's output of the encoder, are told, and so are those of another image."""

from typing import Any

import pytest
from canary_vllm.hooks import HOOKS
from vllm_on_cpu import guarded
from vllm_on_cpu.media import Listener, MediaEngine, Viewer

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("contents")]
QUIET = dict(read_check=0, scrub_budget="0", bytes="off")
TEXT = [*range(5, 75)]
"""With a sound or an image more than a step may compute."""


@pytest.fixture(scope="module", params=[Listener, Viewer])
def small(request: pytest.FixtureRequest) -> MediaEngine:
    """One for all tests with sounds, and one for all with images."""
    if request.param is Viewer:
        reason = "this Transformers reads images with torchvision alone"
        pytest.importorskip("transformers.models.idefics3.image_processing_pil_idefics3", reason=reason)
    return request.param()


def serve(small: MediaEngine, media: dict[str, int], text: list[int] = TEXT) -> dict[str, list[int]]:
    """One request after the other."""
    done = {}
    for name, seed in media.items():
        small.ask(name, seed, text, 50)
        done |= small.run()
    return done


def learn(small: MediaEngine) -> None:
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
    """The same sound or image by a hit, and another one, in chunks."""
    small.renew()
    media = {f"{turn}": seed for turn, seed in enumerate((1, 2, 1, 3, 2, 1))}
    plain = serve(small, media)
    with guarded.guard(small, **QUIET, recompute="100%") as guard:
        learn(small)
        assert serve(small, media) == plain
        (session,) = HOOKS.sessions
        answers = list(session.recomputed.answers)
        assert {answer.verdict for answer in answers[-6:]} == {"same"}
        assert [one for one in guard.trouble() if not one.startswith("unjudged ")] == []
        assert not any("canary" in str(key) for key in small.scheduler.encoder_cache_manager.request_cached_ids)


def test_a_hit_across_media_is_told(small, monkeypatch):
    """vLLM's hash of blocks forgets the media."""
    from vllm.v1.core import kv_cache_utils

    with guarded.guard(small, **QUIET, recompute="100%") as guard:
        learn(small)
        monkeypatch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", lambda _, __, ___, index: (None, index))
        serve(small, {"well": 1, "ill": 2})
        assert {(layer, position, name) for layer, position, name, _ in told(guard)} == {(0, small.at, "ill")}
        assert {rule for *_, rule in told(guard)} == {"brought"}


def test_another_output_of_the_encoder_is_told(small):
    """vLLM has kept another one for the next request with that sound or image."""
    with guarded.guard(small, **QUIET, recompute="100%") as guard:
        learn(small)
        one, other = (small.ask(name, seed, TEXT, 50) for name, seed in (("one", 1), ("other", 2)))
        first, second = (small.scheduler.requests[name].mm_features[0].identifier for name in (one, other))
        small.run()
        small.runner.encoder_cache[second] = small.runner.encoder_cache[first].clone()
        serve(small, {"ill": 2}, [9, *TEXT])
        assert {(layer, position, name) for layer, position, name, _ in told(guard)} == {(0, small.at, "ill")}
