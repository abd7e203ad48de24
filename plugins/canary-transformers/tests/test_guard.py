"""Turning it on and off, and what happens when something of ours, or a finding, stops the way."""

import importlib
import json
import os
import subprocess
import sys
from functools import partial
from importlib import metadata

import canary_transformers
import pytest
import torch
from canary_transformers.continuous.batch import ContinuousBatch
from canary_transformers.filters import EarlierBytesFilter, embedding_row

from canary_adapters import EmbeddingFilter
from canary_core.canary import Canary
from canary_core.errors import ConfigError, PluginError, ViolationError
from canary_core.hookspecs import hookimpl
from canary_core.records import Kind, Phase
from canary_core.violation import Violation

PATCHED = {
    "ContinuousBatchingManager": ["_create_batch_processor", "_generation_step", "stop"],
    "ContinuousMixin": ["continuous_batching_context_manager"],
}


def patched():
    """The engine's functions that we wrap, as they are now."""
    api = importlib.import_module("transformers.generation.continuous_batching.continuous_api")
    return {f"{owner}.{name}": vars(getattr(api, owner))[name] for owner, names in PATCHED.items() for name in names}


class Events:
    """Collects events."""

    def __init__(self):
        self.events = []

    @hookimpl
    def canary_event(self, event):
        self.events.append(event)

    def named(self, name):
        return [e for e in self.events if e.name == name]


class Flip:
    """Flips a bit of every slot in use, once: a finding for sure."""

    def __init__(self, step):
        self.step = step

    @hookimpl
    def canary_pre_forward(self, canary, batch):
        if canary.forwards == self.step:
            for region in canary.regions.values():
                region.sources[0].tensor.view(torch.uint8).view(-1)[::16] ^= 1


def test_close_leaves_the_engine_as_it_was(build, serve, traffic):
    """Classes and objects; twice is harmless; several guards come and go in any order."""
    before = patched()
    first = canary_transformers.guard(build("llama"))
    second = canary_transformers.guard(build("qwen3"))
    assert all(patched()[name] is not original for name, original in before.items())
    serve(build("llama"), traffic(requests=2))
    first.close()
    first.close()
    assert all(patched()[name] is not original for name, original in before.items())
    second.close()
    assert patched() == before
    assert first.stats()["forwards"] > 0
    assert second.stats()["forwards"] == 0


def test_only_the_guarded_model_is_guarded(build, serve, traffic):
    """The context manager gives the guard; another model pays nothing."""
    with canary_transformers.guard(build("llama")) as guard:
        serve(build("qwen3"), traffic(requests=2))
        assert guard.stats() == {"violations": 0, "forwards": 0}
        serve(build("llama"), traffic(requests=2))
        once = guard.stats()["forwards"]
        serve(build("llama"), traffic(requests=2))
    assert guard.stats()["forwards"] == 2 * once > 0


def test_mode_off_touches_nothing(build):
    """Not even the engine's classes."""
    before = patched()
    with canary_transformers.guard(build("llama"), mode="off"):
        assert patched() == before


def test_a_bad_setting_or_version_is_told_where_it_is_given(build, monkeypatch):
    """One sentence: what, what was got, what to do."""
    with pytest.raises(ConfigError, match=r"CANARY_MODE.*'rise'"):
        canary_transformers.guard(build("llama"), mode="rise")
    with pytest.raises(TypeError, match="CANARY_PLUGINS"):
        canary_transformers.guard(None)
    real = metadata.version
    for version in ("5.16.1", "5.24.0", "6.0"):
        monkeypatch.setattr(metadata, "version", lambda name, v=version: v if name == "transformers" else real(name))
        with pytest.raises(PluginError, match=rf">=5.17,<5.24, found {version}; install"):
            canary_transformers.guard(build("llama"))


def test_a_finding_reaches_the_caller_in_raise_mode(build, serve, guard, traffic):
    """The loop runs in a thread of its own, and can only fail requests; `generate_batch` raises."""
    guarded = guard(build("llama"), mode="raise")
    guarded.register(Flip(step=6))
    with pytest.raises(ViolationError, match="changed since") as caught:
        serve(build("llama"), traffic())
    assert caught.value.violation.kind is Kind.BYTES
    assert guarded.violations[0] == caught.value.violation
    guarded.close()
    serve(build("llama"), traffic())


def test_a_finding_that_only_the_end_brings_reaches_the_caller_too(build, guard, traffic, monkeypatch):
    """Findings are read late; what the last read brings is raised at the end of the context."""
    model, load = build("llama"), traffic()

    def drain(canary):
        raise ViolationError(LATE)

    def serve_one():
        with model.continuous_batching_context_manager(
            generation_config=load.generation(), continuous_batching_config=load.engine(model)
        ) as manager:
            manager.add_request([5, 6, 7], max_new_tokens=2)
            while manager.get_result(timeout=1) is None:
                pass
            monkeypatch.setattr(Canary, "drain", drain)

    guard(model, mode="raise")
    with pytest.raises(ViolationError, match="flipped bit"):
        serve_one()


LATE = Violation(Kind.BYTES, "full_attention", Phase.SCRUB, 1, 0, 0, source="k.0", layer=0, half="k")


def test_the_engine_goes_on_in_log_mode_when_something_of_ours_breaks(build, serve, guard, traffic, monkeypatch):
    """The adapter raises in the middle of a run: off, loudly, and the outputs are what they are."""
    bare = serve(build("gemma3"), traffic())
    original = ContinuousBatch.view

    def view(self, batch):
        if events.named("attached") and guarded.stats()["forwards"] == 5:
            raise ZeroDivisionError("ours")
        return original(self, batch)

    events, guarded = Events(), guard(build("gemma3"))
    guarded.register(events)
    monkeypatch.setattr(ContinuousBatch, "view", view)
    assert serve(build("gemma3"), traffic()) == bare
    (disabled,) = events.named("disabled")
    assert disabled.level == "error"
    assert "ZeroDivisionError('ours')" in str(disabled.fields)
    assert guarded.stats()["forwards"] == 5


def test_the_engine_goes_on_in_log_mode_when_its_cache_is_not_what_we_know(build, serve, guard, traffic, monkeypatch):
    """A cache we can't describe: a disabled event when it is made; in raise mode the caller is told."""
    monkeypatch.setattr("canary_transformers.continuous.compat.kv_groups", lambda cache: cache.no_such_attribute)
    events, guarded = Events(), guard(build("llama"))
    guarded.register(events)
    serve(build("llama"), traffic(requests=2))
    assert "no_such_attribute" in str(events.named("disabled")[0].fields)
    guarded.close()
    guard(build("llama"), mode="raise")
    with pytest.raises(AttributeError, match="no_such_attribute"):
        serve(build("llama"), traffic(requests=2))


def test_a_cache_that_lives_on_is_taken_over(build, guard, traffic):
    """A persistent manager keeps its cache, prefixes included: what is there is not judged, what is written is."""
    model, load = build("llama"), traffic(new_tokens=6)
    arguments = {"generation_config": load.generation(), "continuous_batching_config": load.engine(model)}

    def serve_on():
        outputs = model.generate_batch(load.prompts(), persistent_manager=True, **arguments)
        return {tuple(o.prompt_ids): o.generated_tokens for o in outputs.values()}

    try:
        first = serve_on()
        guarded = guard(model)
        assert serve_on() == first
        assert guarded.violations == []
        assert guarded.stats()["unknown_slots"] > 0
        assert serve_on() == first
        assert guarded.violations == []
        guarded.close()
        assert serve_on() == first
    finally:
        model.destroy_cached_continuous_batching_manager()


def test_a_reused_request_name_is_another_request(build, guard, traffic):
    """What the old one wrote proves nothing about the new one."""
    model, load = build("llama"), traffic()
    guarded = guard(model)
    with model.continuous_batching_context_manager(
        generation_config=load.generation(), continuous_batching_config=load.engine(model)
    ) as manager:
        for prompt in load.prompts():
            for tokens in (prompt, prompt[::-1], prompt):
                manager.add_request(tokens, request_id="again", max_new_tokens=5)
                while manager.get_result(timeout=1) is None:
                    pass
    assert guarded.violations == []
    assert guarded.stats()["forwards"] > 50


def test_lost_writes_that_the_embedding_explains_are_dismissed(build):
    """Equal rows, and rows of zeros; nothing else."""
    model = build("llama")
    weight = model.get_input_embeddings().weight.data
    kept = weight[[7, 8, 9]].clone()
    try:
        weight[7] = weight[8]
        weight[9] = 0
        vet = EmbeddingFilter(partial(embedding_row, model))

        def lost(token, stored, kind=Kind.LOST_WRITE):
            return Violation(kind, "r", Phase.POST_FORWARD, 3, 1, 0, token=token, stored_token=stored, step_written=2)

        assert "same embedding" in vet.canary_dismiss(lost(7, 8))
        assert "all zero" in vet.canary_dismiss(lost(9, 8))
        assert vet.canary_dismiss(lost(7, 10)) is None
        assert vet.canary_dismiss(lost(8, 9)) is None
        assert vet.canary_dismiss(lost(7, 8, Kind.BYTES)) is None
        assert vet.canary_dismiss(lost(99999, 8)) is None
        assert EarlierBytesFilter().canary_dismiss(lost(7, 10)) is None
    finally:
        weight[[7, 8, 9]] = kept


def test_zero_embeddings_raise_no_alarm_in_the_engine(build, guard, traffic, has_pool):
    """A prompt of padding tokens writes zeros over zeros in the first layer."""
    model = build("llama")
    assert not model.get_input_embeddings().weight[0].any()
    guarded = guard(model)
    load = traffic(requests=1)
    outputs = model.generate_batch(
        [[0] * 20, [0, 0, 5, 0]], generation_config=load.generation(), continuous_batching_config=load.engine(model)
    )
    assert len(outputs) == 2
    assert guarded.violations == []
    # Where the cache isn't cleared, there were other bytes before.
    assert guarded.stats()["dismissed"] > 0 or not has_pool


SCRIPT = """
import json, logging, sys
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from canary_core import plugins
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1)).eval()
page = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
model.generate_batch([[5, 6, 7]], generation_config=GenerationConfig(max_new_tokens=3, eos_token_id=-1),
    continuous_batching_config=ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=16, **{page: 8}))
from canary_transformers import plugin
print(json.dumps({"argv": sys.argv[1:], "stats": plugin._guard.stats() if plugin._guard else None}))
"""


@pytest.mark.parametrize("allowed", ["transformers", ""])
def test_an_unchanged_script_is_guarded_through_the_environment(allowed, tmp_path):
    """``CANARY_PLUGINS=transformers canary run script.py``; without the variable nothing is loaded."""
    if not any(p.name == "transformers" for p in metadata.entry_points(group="canary")):
        pytest.skip("canary-transformers is not installed, only on the path: no entry point")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = subprocess.run(
        [sys.executable, "-m", "canary_core", "run", str(script), "--flag"],
        env={**os.environ, "CANARY_PLUGINS": allowed},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["argv"] == ["--flag"]
    assert (told["stats"] is not None) == bool(allowed)
    if allowed:
        assert told["stats"]["forwards"] == 3
