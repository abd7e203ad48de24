"""The frame around the guard: what happens without the engine, with the wrong one, and when things break."""

import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from canary_sglang import plugin, session, version
from canary_sglang.compat import runners
from canary_sglang.hooks import Hooks
from canary_sglang.plugin import start

from canary_core import plugins
from canary_core.config import CanaryConfig
from canary_core.errors import PluginError

pytestmark = pytest.mark.timeout(300)


@pytest.mark.without_engine
def test_start_does_nothing_unless_it_is_named(monkeypatch):
    """SGLang calls us wherever we are installed: without ``CANARY_PLUGINS`` nothing is loaded."""
    started = []
    monkeypatch.delenv("CANARY_PLUGINS", raising=False)
    monkeypatch.setattr(plugins, "start", started.append)
    start()
    assert started == []


@pytest.mark.without_engine
@pytest.mark.parametrize(
    ("installed", "status"),
    [("0.5.13", "too_old"), ("0.5.14", "tested"), ("0.5.23", "tested"), ("0.5.24", "newer"), ("0.6.0rc1", "newer")],
)
def test_the_version_is_checked(monkeypatch, installed, status):
    """The declared range is what is checked before anything is hooked."""
    monkeypatch.setattr(metadata, "version", lambda name: installed)
    assert version.engine().status == status


@pytest.mark.without_engine
@pytest.mark.parametrize("installed", ["0.5.13.post1", "0.5.24"])
def test_another_release_is_refused_before_anything_is_hooked(monkeypatch, installed):
    """The error says what is supported and what was found; none of our hooks is registered."""
    monkeypatch.setattr(metadata, "version", lambda name: installed)
    monkeypatch.setattr(Hooks, "start", lambda hooks, config: pytest.fail("hooked"))
    config = CanaryConfig(plugins=["sglang"], untested="refuse")
    process = plugins.Plugins()
    process.load(config)
    (plugin,) = process.install(config)
    assert version.SUPPORTED in plugin.error
    assert f"got sglang {installed}" in plugin.error


@pytest.mark.without_engine
def test_hooks_without_a_configuration_only_call_on():
    """After ``stop`` the engine runs as if we were not there; registered hooks can't be taken back."""
    hooks = Hooks()
    hooks.stop()
    assert hooks._forward(lambda runner, batch: (runner, batch), "runner", "batch") == ("runner", "batch")
    assert hooks._batch(lambda scheduler, batch: (scheduler, batch), "scheduler", "batch") == ("scheduler", "batch")
    assert hooks._flushed(True, "scheduler") is None
    assert hooks._idle(None, "scheduler") is None


@pytest.mark.without_engine
def test_an_engine_that_runs_without_our_hooks_is_told(findings):
    """A scheduler that runs batches while no forward is seen is a silence event: SGLang swallows what breaks a hook."""
    hooks = Hooks()
    hooks._config = CanaryConfig.load(silence_s=0.01)
    hooks._batch(lambda scheduler, batch: None, "scheduler", SimpleNamespace(reqs=[]))
    deadline = time.monotonic() + 10
    while not findings.events and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [(event.name, event.level) for event in findings.events] == [("silence", "error")]
    assert "no pool was attached" in findings.events[0].fields["reason"]


@pytest.mark.without_engine
def test_a_start_is_finished_before_the_first_request():
    """What compiles beside SGLang's capture of graphs is waited for where its loop begins, for each model."""
    done = []

    def session(name):
        return SimpleNamespace(canary=SimpleNamespace(finish_warm_up=lambda: done.append(name)))

    hooks = Hooks()
    hooks._by_runner = {1: session("served"), 2: session("draft")}
    assert hooks._loop(lambda scheduler: done.append(scheduler) or "ended", "loop") == "ended"
    assert done == ["served", "draft", "loop"]


@pytest.mark.without_engine
def test_each_model_of_a_process_has_a_session_of_its_own(monkeypatch):
    """A draft model's session stands beside the target's and hears of requests, flushes and idling as that does; a new
    target in the same process ends all of them."""
    told = []

    class FakeStep:
        def __init__(self, model):
            self.model = model

        def __getattr__(self, name):
            return lambda *args: told.append((self.model, name))

    class FakeSession(FakeStep):
        sweep = SimpleNamespace(before_batch=lambda scheduler: None)
        hits = SimpleNamespace(notice=lambda batch: None)
        lifetime = recompute = None
        sampled = SimpleNamespace(answers=SimpleNamespace(begin=lambda: None, issued=lambda result: None))
        unguarded = SimpleNamespace(computed=lambda tokens: None)

        def __init__(self, runner, config, requests):
            super().__init__(runners.draft_name(runner))
            step = FakeStep(self.model)
            self.runner, self.canary = runner, SimpleNamespace(step=step, guard=lambda where: nullcontext())
            self.requests = requests or object()

    monkeypatch.setattr("canary_sglang.hooks.attach_runner", FakeSession)
    hooks = Hooks()
    # The hooks of SGLang's draft workers need SGLang.
    hooks._drafts = SimpleNamespace(register=lambda runner: None)
    hooks._config = CanaryConfig.load(silence_s=0)
    target, draft, later = (SimpleNamespace(is_draft_worker=d, draft_model_idx=i) for d, i in ((0, 0), (1, 0), (1, 2)))
    for runner in (target, draft, later):
        hooks._attach(runner)
    assert [session.model for session in hooks.sessions] == [None, "draft", "draft2"]
    assert hooks.session.runner is target
    assert len({session.requests for session in hooks.sessions}) == 1
    idle = SimpleNamespace(is_idle=lambda: True)
    batch = SimpleNamespace(reqs=[], forward_mode=idle)
    assert hooks._batch(lambda scheduler, batch: batch, "scheduler", batch) is batch
    hooks._flushed(True, "scheduler")
    hooks._idle(None, "scheduler")
    hooks._forward(None, draft, "batch")
    calls = ("notice", "follow_check", "flushed", "idle")
    assert told == [(s, call) for call in calls for s in (None, "draft", "draft2")] + [("draft", "forward")]
    del told[:]
    hooks._attach(SimpleNamespace(is_draft_worker=False))
    assert told == [(None, "close"), ("draft", "close"), ("draft2", "close")]
    assert [session.model for session in hooks.sessions] == [None]
    hooks.stop()
    assert hooks.session is None
    assert hooks.sessions == ()


def test_an_error_of_ours_never_stops_the_engine(start):
    """In log mode a broken Canary switches itself off with an event, and the engine's outputs stay what they are."""
    engine = start("mha")
    before = engine.serve(prompts=engine.setup.traffic(0, 4), new_tokens=4)["outputs"]
    engine.flush()
    engine.break_us()
    assert engine.serve(prompts=engine.setup.traffic(0, 4), new_tokens=4)["outputs"] == before
    off = [event for event in engine.events() if event["name"] == "disabled"]
    assert len(off) == 1
    assert off[0]["level"] == "error"
    assert "broken on purpose" in off[0]["error"]


def test_raise_mode_stops_the_engine(start):
    """The finding comes out of the engine's own forward."""
    engine = start("mha", CANARY_MODE="raise")
    engine.serve(prompts=engine.setup.traffic(0, 4), new_tokens=4)
    engine.flip(region="full", source="v.1", seed=0)
    with pytest.raises(RuntimeError, match=r"ViolationError: bytes in region full.*v\.1"):
        engine.serve(prompts=engine.setup.traffic(9, 4), new_tokens=4)


def test_raise_mode_never_runs_unguarded():
    """SGLang swallows what its plugins raise, so a guard that can't be had ends the process."""
    code = (
        "import canary_sglang.version as v; v.SUPPORTED = '>=99'\n"
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins()\n"
        "print('went on')"
    )
    environment = {"CANARY_PLUGINS": "sglang", "CANARY_MODE": "raise", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert "went on" not in done.stdout
    assert "supports sglang >=99" in done.stderr


def test_a_newer_release_is_hooked_loudly():
    """One that was not tested is looked at in SGLang's own plugin loader, hooked, and to be audited; the event says
    so."""
    code = (
        "import canary_sglang.version as v; v.SUPPORTED = '>=0.5,<0.5.2'\n"
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins()\n"
        "from canary_sglang.hooks import HOOKS\n"
        "from sglang.srt.managers.scheduler import Scheduler\n"
        "print([HOOKS._config.untested_engine, HOOKS._config.audit, hasattr(Scheduler.run_batch, '__wrapped__')])"
    )
    environment = {**os.environ, "CANARY_PLUGINS": "sglang", "CANARY_LOG_FORMAT": "json"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.splitlines()[-1] == "[True, 4, True]", done.stderr
    events = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    (event,) = (e for e in events if e.get("event") == "untested_engine")
    assert (event["engine"], event["version"]) == ("sglang", metadata.version("sglang"))
    assert [e["installed"] for e in events if e.get("event") == "plugins_installed"] == [["sglang"]]


@pytest.mark.without_engine
def test_a_device_that_cannot_be_read_any_more_is_told(monkeypatch):
    """An engine that has failed with its device: its last findings are lost, which is said, and nothing is raised."""

    def broken(device):
        raise RuntimeError("CUDA error: device-side assert triggered")

    told = []
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    canary = SimpleNamespace(
        enabled=True, device=torch.device("cuda"), tell=told.append, drain=lambda: pytest.fail("read")
    )
    session.Session.last_words(SimpleNamespace(canary=canary))
    assert [(event.name, event.level) for event in told] == [("findings_lost", "warning")]
    assert "device-side assert" in told[0].fields["reason"]


@pytest.mark.without_engine
def test_the_suite_is_run_from_a_checkout():
    """``canary check-plugin sglang`` can't start engines on a CPU wherever SGLang is installed; it says what to do."""
    tests = Path(__file__).with_name("test_conformance.py")
    with pytest.raises(PluginError, match=f"-k {tests.stem}"):
        plugin.canary_conformance()
    assert tests.exists()


OWN_READINESS = """
import sys
from pathlib import Path
from types import SimpleNamespace
from fastapi.testclient import TestClient
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.tokenizer_manager import ServerStatus, TokenizerManager
from sglang.srt.plugins.hook_registry import HookRegistry
from canary_core import CanaryConfig
from canary_sglang.hooks import HOOKS

if not hasattr(TokenizerManager, "is_ready"):
    print("none")
    sys.exit()
file = Path(sys.argv[1])
HOOKS.start(CanaryConfig.load(unready_file=str(file), silence_s=0))
HookRegistry.apply_hooks()
manager = TokenizerManager.__new__(TokenizerManager)
manager.is_pause, manager.gracefully_exit, manager.server_status = False, False, ServerStatus.Up
http_server._global_state = SimpleNamespace(tokenizer_manager=manager)
client = TestClient(http_server.app)
told = [client.get("/ready").status_code]
file.touch()
told.append(client.get("/ready").status_code)
file.unlink()
told.append(client.get("/ready").status_code)
manager.server_status = ServerStatus.UnHealthy
told.append(client.get("/ready").status_code)
print(told)
"""


def test_sglangs_own_readiness_follows_the_file_of_canarys(tmp_path):
    """``GET /ready`` of SGLang's server: 503 while ``CANARY_UNREADY_FILE`` is there, and SGLang's own answer otherwise.
    Nothing else of the server changes: ``/health`` is what restarts a container."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", OWN_READINESS, str(tmp_path / "unready")],
        capture_output=True,
        text=True,
        env=environment,
    )
    told = done.stdout.splitlines()[-1:]
    if told == ["none"]:
        pytest.skip("this release of SGLang has no /ready")
    assert told == ["[200, 503, 200, 503]"], done.stderr
