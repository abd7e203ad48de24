"""Real SGLang on a CPU, broken from outside so that Canary goes blind: the engine serves on, and it is told."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(900)


def told(engine, name):
    """The events of this name."""
    return [event for event in engine.events() if event["name"] == name]


@pytest.mark.beyond_ci("the same, told by the summary")
def test_a_forward_that_runs_past_the_hook_is_told_while_the_engine_serves(start):
    """A runner whose path leads past the hooked function: its scheduler's books say what was computed, and half a
    minute of traffic shows that nobody has seen it."""
    engine = start("mha")
    traffic = engine.setup.traffic(0, 4)
    engine.serve(prompts=traffic, new_tokens=4)
    assert told(engine, "unguarded_tokens") == []
    engine.bypass(function="forward")
    seconds = engine.serve_until_told(event="unguarded_tokens", seconds=60, prompts=traffic)
    assert seconds is not None
    assert seconds < 45
    (event,) = told(engine, "unguarded_tokens")
    assert event["level"] == "warning"
    assert 0 < event["missing_tokens"] < event["computed_tokens"]


def test_a_short_run_past_the_hook_is_told_at_its_end(start):
    """The summary has one more warning, which names how many tokens nobody has seen: just those of the batches that ran
    past the hook. The answers are those of a guarded run."""
    engine = start("mha")
    traffic = engine.setup.traffic(0, 4)
    before = engine.serve(prompts=traffic, new_tokens=4)["outputs"]
    seen = engine.findings()["stats"]
    assert seen["computed_tokens"] == seen["guarded_tokens"] > 0
    engine.flush()
    engine.bypass(function="forward")
    assert engine.serve(prompts=traffic, new_tokens=4)["outputs"] == before
    engine.uninstall()
    (summary,) = told(engine, "summary")
    passed = summary["computed_tokens"] - summary["guarded_tokens"]
    assert summary["guarded_tokens"] == seen["guarded_tokens"]
    assert passed > 4 * 4
    assert any(f"{passed} of {summary['computed_tokens']} tokens" in warning for warning in summary["warnings"])


@pytest.mark.beyond_ci("lost events of the allocator, without an engine")
@pytest.mark.parametrize("method", ["alloc", "free"])
def test_a_lost_event_of_the_allocator_is_told(start, method):
    """The hook of one function of the allocator is gone: slots that were given back are handed out again, or written
    without having been handed out. That contradicts what Canary knows, and is a finding."""
    engine = start("mha")
    engine.serve(prompts=engine.setup.traffic(0), new_tokens=8)
    assert engine.findings()["violations"] == []
    engine.lose(method=method)
    for seed in (1, 2, 3):
        engine.serve(prompts=engine.setup.traffic(seed), new_tokens=8)
        engine.flush()
    kinds = {violation["kind"] for violation in engine.findings()["violations"]}
    assert kinds or told(engine, "lifetime_off")


HOOKS = """
from sglang.srt.plugins import hook_registry, load_plugins

apply = hook_registry.HookRegistry._apply_target.__func__

def failing(cls, target, hooks):
    if {broken}:
        raise RuntimeError("broken on purpose")
    apply(cls, target, hooks)

hook_registry.HookRegistry._apply_target = classmethod(failing)
load_plugins()
import time
from canary_sglang.hooks import HOOKS
{then}
print("went on")
"""


@pytest.mark.where(pytest.mark.beyond_ci("hooks none of which could be applied"), then="HOOKS._look_at_hooks()")
@pytest.mark.parametrize(
    ("broken", "then", "named"),
    [
        ("target.endswith('ModelRunner.forward')", "HOOKS._look_at_hooks()", ["ModelRunner.forward"]),
        ("True", "time.sleep(7)", ["ModelRunner.forward", "ModelRunner.alloc_memory_pool", "Scheduler.run_batch"]),
    ],
    ids=["one", "all"],
)
def test_hooks_that_sglang_could_not_apply_are_told(broken, then, named):
    """SGLang logs and swallows what goes wrong when it applies hooks. Those that are missing are looked for when a pool
    is allocated, and, where not even that is seen, after ``CANARY_SILENCE_S``."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("CANARY_")},
        "CANARY_PLUGINS": "sglang",
        "CANARY_LOG_FORMAT": "json",
        "CANARY_SILENCE_S": "1" if broken == "True" else "0",
    }
    code = HOOKS.format(broken=broken, then=then)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.splitlines()[-1:] == ["went on"], done.stderr
    events = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    (event,) = (e for e in events if e.get("event") == "hooks_left_out")
    assert event["level"] == "error"
    for name in named:
        assert name in event["reason"]
    assert ("Scheduler.run_batch" in event["reason"]) == (broken == "True")


@pytest.mark.where(pytest.mark.beyond_ci("a misspelt name, and each entry point by itself"), name="SGLang")
@pytest.mark.parametrize("name", ["sglag", "SGLang"])
def test_a_misspelt_plugin_is_told_in_sglangs_own_process(name):
    """SGLang swallows what its plugins raise, so a name that is not installed is an event, with the one that is meant;
    a name in another case is the plugin's."""
    environment = {**os.environ, "CANARY_PLUGINS": name, "CANARY_LOG_FORMAT": "json"}
    code = "from sglang.srt.plugins import load_plugins\nload_plugins()\nprint('went on')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.splitlines()[-1:] == ["went on"], done.stderr
    events = {e["event"]: e for e in map(json.loads, (x for x in done.stderr.splitlines() if x.startswith("{")))}
    if name == "SGLang":
        assert events["plugins_installed"]["installed"] == ["sglang"]
    else:
        assert "Did you mean 'sglang'?" in events["start_failed"]["error"]
        assert events["start_failed"]["level"] == "error"
