"""Caches of `generate()` are audited: the engine's own tensors, against what the regions and views say."""

from typing import Any

import pytest
import torch
from canary_transformers import Guard
from canary_transformers.generate.groups import Group
from tiny.generation import expect_clean, generate, prompts
from tiny.models import generating
from transformers.cache_utils import DynamicLayer

from canary_core import AttachError, CanaryConfig
from canary_core.testing import Findings

pytestmark = pytest.mark.usefixtures("one_thread")


def audited(**settings: Any) -> tuple[Guard, Findings]:
    """A guard of all models, for an engine that is newer than tested."""
    config = CanaryConfig.load(**{"read_check": -1, "log_level": "error", **settings}).for_untested_engine()
    watch, findings = Guard(None, config), Findings()
    watch.register(findings)
    return watch, findings


WAYS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "static beams": {"num_beams": 2, "cache_implementation": "static"},
    "long": {"max_new_tokens": 130},
}


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("way", WAYS)
def test_the_first_forwards_of_a_cache_are_audited(name: str, way: str) -> None:
    """Tensors that grow and tensors that stay: each pass, the answer is the same, and nothing else is told."""
    model = generating(name)
    expected = generate(model, prompts(), **WAYS[way])
    watch, findings = audited()
    with watch:
        assert torch.equal(generate(model, prompts(), **WAYS[way]), expected)
        expect_clean(watch)
    (event,) = findings.told("audit")
    assert event.fields["forwards"] == 4
    assert 0 < event.fields["changed_bytes"] == event.fields["claimed_bytes"]
    assert event.fields["unclaimed_bytes"] == 0
    assert [e.name for e in findings.events if e.level != "info"] == []


def test_a_layer_that_no_region_has_fails_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer release, of which our regions leave V of a layer out: told with the engine's own name, and off."""
    region = Group.sources
    monkeypatch.setattr(
        Group, "sources", lambda group, views: tuple(s for s in region(group, views) if s.name != "v.1")
    )
    watch, findings = audited()
    with watch:
        generate(generating("llama"), prompts())
    (event,) = findings.told("audit_failed")
    assert "'layers[1].values'" in event.fields["problems"][0]
    (off,) = findings.told("disabled")
    assert off.fields["where"] == "audit"


def test_bytes_that_no_view_names_fail_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer release that changes what earlier tokens have left while the cache grows."""
    update = DynamicLayer.update

    def rotates(layer: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        grown = update(layer, keys, values, *args, **kwargs)
        if keys.shape[2] == 1:
            layer.keys[:, :, 3] += 1.0
        return grown

    monkeypatch.setattr(DynamicLayer, "update", rotates)
    watch, findings = audited(read_check=0)
    with watch:
        generate(generating("llama"), prompts())
    (event,) = findings.told("audit_failed")
    assert event.fields["unclaimed_bytes"] > 0


def test_an_audit_that_can_not_be_made_is_loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is found: an error says what was not proven and what to do, and guarding goes on; raise mode stops."""
    monkeypatch.setattr("canary_transformers.generate.caches.pool_tensors", lambda cache: {})
    watch, findings = audited()
    with watch:
        generate(generating("llama"), prompts())
        assert watch.stats()["forwards"] == 12
    (event,) = findings.told("audit_skipped")
    assert event.level == "error"
    assert "CANARY_UNTESTED=refuse" in event.fields["not_proven"]
    watch, _ = audited(mode="raise")
    with watch, pytest.raises(AttachError, match="could not be made"):
        generate(generating("llama"), prompts())
