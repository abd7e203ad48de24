"""``torch.set_default_device("cuda")`` is usual in scripts: whatever it says, the guard goes by the cache's device.

Here it is ``meta`` within all that Transformers calls of the plugin, which has no bytes.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from canary_transformers.continuous.session import Session
from canary_transformers.generate.guarded_cache import GuardedCache
from tiny.batching import Traffic, serve
from tiny.generation import LOOP, expect_clean, flip, forwards, generate, listening, new_cache, prompts
from tiny.models import batching, generating

from canary_core import Kind

pytestmark = pytest.mark.usefixtures("one_thread")


def elsewhere(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` with another default device."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.device("meta"):
            return method(*args, **kwargs)

    return call


@pytest.fixture(autouse=True)
def another_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all that the engine's hooks call. A session's `step` calls the engine itself."""
    for owner, more in ((GuardedCache, {"__init__"}), (Session, {"__init__", "_check", "_after"})):
        for name, method in list(vars(owner).items()):
            if callable(method) and (name in more or not name.startswith("_")) and name != "step":
                monkeypatch.setattr(owner, name, elsewhere(method))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "how", [{}, {"num_beams": 3}, {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 3}]
)
def test_generate_is_silent_and_stays_guarded(name: str, how: dict[str, Any]) -> None:
    """With beams, crops and static caches, too."""
    model = generating(name)
    watch, findings = listening(model)
    with watch:
        generate(model, LOOP if "prompt_lookup_num_tokens" in how else prompts(), disable_compile=True, **how)
    assert expect_clean(watch)["forwards"] > 3
    assert [e.fields for e in findings.events if e.name == "disabled"] == []


def test_a_flip_in_a_cache_is_found() -> None:
    """And explained."""
    model = generating("llama")
    watch, findings = listening(model)
    with watch:
        cache = new_cache(model, "dynamic")
        forwards(model, cache, prompts(2, 9), prompts(2, 1))
        flip(cache, 1, "keys", row=0, index=4)
        forwards(model, cache, prompts(2, 1))
    assert {(v.kind, v.source, v.position) for v in watch.violations} == {(Kind.BYTES, "k.1", 4)}
    assert [e.fields["diagnosis"] for e in findings.events if e.name == "diagnosis"] == ["flipped_bit"]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_continuous_batching_is_silent_and_stays_guarded(name: str) -> None:
    """Chunked prefills, decodes, shared prefixes."""
    model = batching(name)
    watch, findings = listening(model)
    with watch:
        serve(model, Traffic(seed=1))
    assert expect_clean(watch)["forwards"] > 10
    assert [e.fields for e in findings.events if e.name == "disabled"] == []
