"""What the plugin does not know: told in one event with the reason, the rest is guarded, and vLLM goes on as it is."""

from contextlib import contextmanager

import pytest
from canary_vllm.compat import targets
from canary_vllm.hooks import HOOKS, Hooks
from vllm_on_cpu import guarded

from canary_core import CanaryConfig, HookTarget, PluginError, hook_manager
from canary_core.testing import Findings

pytestmark = pytest.mark.timeout(600)
LLAMA = pytest.param("llama", marks=pytest.mark.xdist_group("process 0"))
ONLY = pytest.mark.parametrize("engine", [LLAMA], indirect=True)


@contextmanager
def refused(small):
    """Where hooks are installed, and yet the engine is not guarded: yields what was told."""
    findings = Findings()
    hook_manager().register(findings)
    HOOKS.start(CanaryConfig.load())
    try:
        small.renew()
        assert HOOKS.sessions == ()
        yield findings
    finally:
        HOOKS.stop()
        hook_manager().unregister(findings)


@ONLY
def test_a_layer_with_an_unknown_layout_is_left_out(engine, monkeypatch):
    """A layer whose store operation puts a token where no formula says is named with the reason, at the coverage; the
    other layer is guarded, and answers stay the same."""
    small = engine.small
    small.renew()
    plain = guarded.traffic(small, 1)
    layers = small.runner.compilation_config.static_forward_context
    name = next(n for n in layers if ".1." in n)
    right = layers[name].impl.do_kv_cache_update

    def scattered(layer, key, value, kv_cache, slot_mapping):
        if len(kv_cache) == 3:  # a probe
            slot_mapping = slot_mapping**2 % 96
        right(layer, key, value, kv_cache, slot_mapping)

    # Not setattr, which would leave the method on the layer's own object.
    monkeypatch.setitem(vars(layers[name].impl), "do_kv_cache_update", scattered)
    # Layers of one sort are probed once.
    monkeypatch.setattr(layers[name], "kv_cache_dtype", "scattered")
    with guarded.guard(small, read_check=64) as guard:
        answers = guarded.traffic(small, 1)
        guard.canary.drain()
        (coverage,) = guard.findings.told("coverage")
    assert answers == plain
    assert guard.findings.violations == []
    assert coverage.fields["coverage_ratio"] == 0.5
    (left_out,) = coverage.fields["uncovered"]
    assert name in str(left_out)
    assert "its layout is not known" in str(left_out)


@ONLY
def test_a_pool_of_which_nothing_is_known_is_not_guarded(engine, monkeypatch):
    """No store operation at all: one coverage event says why, and the engine serves."""
    small = engine.small
    for layer in small.runner.compilation_config.static_forward_context.values():
        monkeypatch.setattr(type(layer.impl), "do_kv_cache_update", None)
    with refused(small) as findings:
        monkeypatch.undo()
        (coverage,) = findings.told("coverage")
        assert "no operation of its own" in str(coverage.fields["uncovered"])
        assert len(guarded.traffic(small, 1)[0]) == 8


@ONLY
def test_a_diffusion_model_is_not_guarded(engine, monkeypatch):
    """It computes the tokens of its canvas several times, which would look like wrong input: the coverage says so. Here
    a llama whose config says that it is one."""
    small = engine.small
    monkeypatch.setitem(vars(small.runner.vllm_config.model_config), "is_diffusion", True)
    with refused(small) as findings:
        (coverage,) = findings.told("coverage")
        assert "a diffusion model computes" in str(coverage.fields["uncovered"])


@ONLY
def test_a_moved_scheduler_leaves_forwards_guarded(engine, monkeypatch):
    """A function of the block pool that is gone is named in one event; forwards are guarded without it."""
    moved = HookTarget(f"{targets.POOL}.get_new_bricks", ("bricks",))
    monkeypatch.setattr(targets, "LIFETIME", (*targets.LIFETIME, moved))
    with guarded.guard(engine.small, read_check=64) as guard:
        guarded.traffic(engine.small, 1)
        guard.canary.drain()
        (event,) = guard.findings.told("hooks_left_out")
        assert "get_new_bricks" in event.fields["reason"]
        assert guard.canary.stats()["checked_slots"] > 1000


def test_a_moved_runner_leaves_the_other_hooked(monkeypatch):
    """Of two runners the one that moved is named, and the other hooked; where both moved the plugin refuses."""
    moved = HookTarget(f"{targets.V2}.run_model")
    findings, hooks = Findings(), Hooks()
    hook_manager().register(findings)
    try:
        monkeypatch.setitem(targets.RUNNERS, targets.V2, (moved,))
        assert tuple(targets.hook_targets()) == targets.RUNNERS[targets.V1]
        hooks.start(CanaryConfig.load())
        (event,) = findings.told("hooks_left_out")
        assert "run_model" in event.fields["reason"]
        hooks.stop()
        monkeypatch.setitem(targets.RUNNERS, targets.V1, (HookTarget(f"{targets.V1}.run_model"),))
        assert len(targets.hook_targets()) == 2
        with pytest.raises(PluginError):
            hooks.start(CanaryConfig.load())
    finally:
        hooks.stop()
        hook_manager().unregister(findings)


def test_an_executor_that_asks_the_last_stage_alone_is_told(engine, monkeypatch):
    """As vLLM's older Ray executor does: with protect, tokens may leave before another stage's verdict. One event says
    so, and none without stages."""
    parallel = engine.small.core.vllm_config.parallel_config
    for stages in (1, 2):
        with guarded.guard(engine.small, on_violation="protect") as guard:
            monkeypatch.setattr(parallel, "pipeline_parallel_size", stages)
            HOOKS._started(None, engine.small.core)
            monkeypatch.setattr(parallel, "pipeline_parallel_size", 1)
            reasons = [event.fields["reason"] for event in guard.findings.told("quarantine_failed")]
            assert len(reasons) == stages - 1
            assert all("pipeline stages before the last" in reason for reason in reasons)
            assert len(guarded.traffic(engine.small, 1)) == 1
