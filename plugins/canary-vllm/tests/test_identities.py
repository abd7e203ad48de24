"""LoRA adapters and cache salts: requests that are alike but for these share nothing; where they do, it is told."""

from typing import Any

import pytest
from vllm_on_cpu import guarded

from canary_core import Kind

pytestmark = pytest.mark.timeout(600)
ONLY = pytest.mark.parametrize(
    "engine", [pytest.param("llama", marks=pytest.mark.xdist_group("process 0"))], indirect=True
)
PROMPT = [(7 * i) % 400 + 3 for i in range(100)]
NONE = "no LoRA adapter, cache salt or extra key"


def lora(name: str) -> dict[str, Any]:
    """An adapter as vLLM knows it; the engine serves none, so that nothing is loaded."""
    from vllm.lora.request import LoRARequest

    return {"lora_request": LoRARequest(name, len(name), f"/adapters/{name}")}


def salt(text: str) -> dict[str, Any]:
    """As a client gives it with its prompt."""
    return {"cache_salt": text}


def in_turn(small: Any, *identities: dict[str, Any]) -> list[list[int]]:
    """The prompt once for each, one after the other."""
    for number, identity in enumerate(identities):
        small.submit(f"turn-{number}", PROMPT, 4, **identity)
        while small.step():
            pass
    return [small.answers[f"turn-{number}"] for number in range(len(identities))]


@ONLY
def test_identities_share_nothing_and_are_silent(engine):
    """Prefix hits within each, and beside each other in one batch."""
    small = engine.small
    with guarded.guard(small) as guard:
        in_turn(small, {}, salt("a"), salt("b"), salt("a"), {})
        for turn in range(2):
            for number, identity in enumerate(({}, salt("a"), salt("c"))):
                small.submit(f"beside-{turn}-{number}", PROMPT, 6, **identity)
            while small.step():
                pass
        assert guard.trouble() == []
        assert guard.canary.stats()["unknown_slots"] == 0


@ONLY
@pytest.mark.parametrize(
    ("identities", "said"),
    [
        ((lambda: salt("a"), lambda: salt("b")), ("cache salt #", "cache salt #")),
        ((dict, lambda: salt("b")), (NONE, "cache salt #")),
        ((lambda: lora("sql"), lambda: lora("law")), ("LoRA adapter sql of", "LoRA adapter law of")),
    ],
)
def test_a_prefix_hit_across_identities_is_told(engine, monkeypatch, identities, said):
    """vLLM's own hash of blocks forgets what tells requests apart: the second one is given the first one's blocks."""
    from vllm.v1.core import kv_cache_utils

    small = engine.small
    with guarded.guard(small) as guard:
        monkeypatch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", lambda _, __, ___, index: (None, index))
        in_turn(small, *(identity() for identity in identities))
        guard.canary.drain()
        (found,) = guard.findings.violations
        assert (found.kind, found.position) == (Kind.PREFIX, 0)
        assert (found.request, found.stored_request) == ("turn-1", "turn-0")
        assert found.stored_identity.startswith(said[0])
        assert found.identity.startswith(said[1])
        assert found.identity != found.stored_identity


@ONLY
def test_a_finding_has_the_trace_of_its_request(engine):
    """From the headers that vLLM keeps with a request, through the scheduler's message, to the event; others have
    none."""
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with guarded.guard(engine.small) as guard:
        engine.small.submit("traced", PROMPT, 8, trace_headers={"traceparent": traceparent, "tracestate": "a=b"})
        engine.small.submit("other", PROMPT[::-1], 8)
        for _ in range(3):
            engine.small.step()
        engine.small.poke(0, "k", "traced", 40)
        while engine.small.step():
            pass
        guard.canary.drain()
        (event,) = guard.findings.told("incident")
        assert event.fields["stored_request"].startswith("traced")
        assert event.fields["traces"] == ["0af7651916cd43dd8448eb211c80319c"]
        assert guard.canary.writers.traces("traced", "other") == {"traced": traceparent}
