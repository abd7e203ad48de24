"""``canary demo``: what counts as passed, and what is printed; on a toy engine, so that faults can be missed."""

import json
from dataclasses import dataclass, replace

import pytest
from click.testing import Result
from support.toy import ToyEngine
from typer.testing import CliRunner

from canary_core import Canary, CanaryConfig, Event
from canary_core.config import ScrubBudget
from canary_core.errors import PluginError
from canary_core.plugins import private_hooks
from canary_core.testing import FAULTS, PROMPT_TOKENS, TOKENS, FaultSpec, Findings, Job, Served
from canary_desk.cli.app import app
from canary_kit import demo
from canary_kit.demo import Demo
from canary_kit.engines import Traffic

SMALL = 8
"""Requests of clean traffic."""


@dataclass
class ToyDemo:
    """Serves each request's own tokens. ``blind``: compares no bytes; ``alarms``: breaks its own memory on clean
    traffic too; ``changes``: answers differently under guard."""

    blind: bool = False
    alarms: bool = False
    changes: bool = False
    name: str = "toy"
    models: tuple[str, ...] = ("plain", "windowed")

    def serve(self, job: Job) -> Served:
        """Two requests at a time; one that ended stays in the pool until its slots are taken."""
        engine = ToyEngine(slots=1024, window=6 if job.model == "windowed" else 0)
        engine.table = engine.table.new_zeros(16, 256)
        config = (
            job.config.model_copy(update={"read_check": 0, "scrub_budget": ScrubBudget()}) if self.blind else job.config
        )
        hooks = private_hooks(*job.plugins)
        canary = Canary(engine.regions(), config, hooks=hooks, writers=engine.writers)
        waiting = [(f"r{i}", list(p)) for i, p in enumerate(job.traffic.prompts)]
        step = 0
        while waiting or engine.requests:
            while waiting and len(engine.requests) < 2:
                engine.submit(*waiting.pop(0))
            engine.step(canary, chunk=16)
            step += 1
            if self.alarms and step == 3:
                engine.k[0][engine.requests[0].slots[0]] += 1
            for request in [r for r in engine.requests if r.cached == len(r.tokens)]:
                engine.requests.remove(request)
                job.finished()
        canary.close()
        answers = [(p[-1], self.changes and canary.forwards > 0) for p in job.traffic.prompts]
        return Served(tuple(answers), canary.stats(), 1.0 + canary.forwards)


def run(monkeypatch: pytest.MonkeyPatch, engine: ToyDemo, *arguments: str) -> Result:
    """``canary demo`` with ``engine`` installed."""
    monkeypatch.setattr(demo, "engines", lambda wanted: [engine])
    return CliRunner().invoke(app, ["demo", "--requests", str(SMALL), *arguments], env={"COLUMNS": "300"})


@pytest.fixture
def one_fault(monkeypatch):
    """Fewer faults and runs, where the number of them is not the point."""
    monkeypatch.setattr(demo, "FAULTS", {"real_kv_used": FAULTS["real_kv_used"]})
    monkeypatch.setattr("canary_desk.cli.demo_screen.FAULTS", {"real_kv_used": FAULTS["real_kv_used"]})
    monkeypatch.setattr(demo, "OVERHEAD_ROUNDS", 1)


@pytest.mark.parametrize("model", ToyDemo.models)
def test_every_fault_is_found_on_clean_ground(model):
    """All faults are injected and found, as themselves, and clean traffic raises no alarm."""
    report = Demo(ToyDemo(), model, seed=3, requests=SMALL).run()
    assert report.passed
    assert [t.fault for t in report.trials] == list(FAULTS)
    assert all(t.injection is not None and t.steps is not None for t in report.trials)
    assert report.clean.bytes_checked > 0


def test_json_is_one_object_per_model_and_nothing_else(monkeypatch, one_fault):
    """Every line of stdout is the object that the documentation shows."""
    result = run(monkeypatch, ToyDemo(), "--json", "--seed", "5")
    assert result.exit_code == 0
    plain, windowed = (json.loads(line) for line in result.stdout.splitlines())
    assert (plain["engine"], plain["model"], windowed["model"]) == ("toy", "plain", "windowed")
    assert list(plain) == ["engine", "model", "clean", "faults", "overhead_pct"]
    assert list(plain["clean"]) == ["forwards", "slots_checked", "bytes_checked", "violations", "outputs_identical"]
    assert plain["clean"]["violations"] == 0
    assert plain["clean"]["outputs_identical"] is True
    (fault,) = plain["faults"]
    assert fault.pop("source")[0] in "kv"
    assert fault == {"fault": "real_kv_used", "injected": 1, "detected": 1, "steps": 0, "kinds": ["bytes"]}


def test_the_screen_tells_what_was_done_and_found(monkeypatch, one_fault):
    """Each fault is one sentence; the table has a column for each model."""
    result = run(monkeypatch, ToyDemo())
    assert result.exit_code == 0
    assert "outputs bit-identical to those without Canary" in result.stdout
    assert "bits of a slot flip that the forward is about to read" in result.stdout
    assert "same forward, bytes: the bytes of slot" in result.stdout
    assert "windowed" in result.stdout
    assert "overhead" in result.stdout


def test_a_bundle_of_one_fault_is_left_to_read(monkeypatch, one_fault, tmp_path):
    """The last line is the command for it, and its page is marked as one of a self-test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = run(monkeypatch, ToyDemo())
    command = result.stdout.splitlines()[-1].partition("canary explain ")[2]
    told = CliRunner().invoke(app, ["explain", command], env={"COLUMNS": "200"})
    assert told.exit_code == 0
    assert "SELF-TEST" in told.output
    assert "real_kv_used" in told.output


def test_a_missed_fault_is_exit_code_1(monkeypatch, one_fault):
    """An engine whose bytes nobody compares misses a flipped one, and the command says so."""
    result = run(monkeypatch, ToyDemo(blind=True))
    assert result.exit_code == 1
    assert "MISSED; found instead: nothing" in result.stdout
    lines = run(monkeypatch, ToyDemo(blind=True), "--json").stdout.splitlines()
    assert [json.loads(line)["faults"][0]["detected"] for line in lines] == [0, 0]


def test_a_false_alarm_is_exit_code_1(monkeypatch, one_fault):
    """A finding on traffic that nothing was injected into fails the demo, and does not pass for the fault."""
    result = run(monkeypatch, ToyDemo(alarms=True), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout.splitlines()[0])["clean"]["violations"] > 0


def test_changed_answers_are_exit_code_1(monkeypatch, one_fault):
    """Canary must never change what the engine computes."""
    result = run(monkeypatch, ToyDemo(changes=True), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout.splitlines()[0])["clean"]["outputs_identical"] is False


def test_a_fault_that_never_happened_does_not_pass(monkeypatch, one_fault):
    """No injection is no proof: nothing can have been found."""
    monkeypatch.setattr(demo, "_once", lambda fault, warmup: FaultSpec(fault=fault, warmup=999))
    trial = Demo(ToyDemo(), "plain", requests=SMALL).trial("real_kv_used")
    assert not trial.passed
    assert trial.fields()["injected"] == 0
    assert "not due" in str(trial.reason)


def test_an_error_of_ours_fails_the_trial(monkeypatch, one_fault):
    """A Canary that switched itself off proves nothing, even if it had found the fault before."""
    heard = Findings()
    honest = Demo(ToyDemo(), "plain", seed=2, requests=SMALL).trial("real_kv_used")
    heard.violations = list(honest.found)
    heard.canary_event(Event("disabled", "error", {"where": "step.end", "error": "boom", "traceback": "..."}))
    judged = demo.judge("real_kv_used", [honest.injection], heard)
    assert judged.found
    assert not judged.passed


def test_another_finding_does_not_count_as_the_fault():
    """What is found elsewhere is a consequence or a false alarm, never the detection."""
    honest = Demo(ToyDemo(), "plain", seed=2, requests=SMALL).trial("real_kv_used")
    assert honest.passed
    heard = Findings()
    heard.violations = list(honest.found)
    moved = replace(honest.injection, slots=(honest.injection.slots[0] + 1,))
    judged = demo.judge("real_kv_used", [moved], heard)
    assert not judged.passed
    assert judged.others == honest.found


def test_traffic_is_seeded_and_shares_prefixes():
    """The same seed gives the same requests; several begin alike, one in six is long."""
    traffic = Traffic.of(60, seed=1)
    assert traffic == Traffic.of(60, seed=1) != Traffic.of(60, seed=2)
    beginnings = [p[:16] for p in traffic.prompts if len(p) >= 16]
    assert len(beginnings) - len(set(beginnings)) > 20
    assert max(map(len, traffic.prompts)) <= PROMPT_TOKENS
    assert all(0 < t < TOKENS for p in traffic.prompts for t in p)
    assert len(traffic.first(7).prompts) == 7


def test_an_engine_that_is_not_there_is_exit_code_2(distribution, fresh_process):
    """One sentence says what is missing, and what there is."""
    result = CliRunner().invoke(app, ["demo", "--engine", "nosuch"])
    assert result.exit_code == 2
    assert "engine 'nosuch' can't be demonstrated: no installed plugin demonstrates it" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_offer_whose_engine_is_missing_says_so(distribution, monkeypatch):
    """A plugin is installed, its engine is not: the sentence names both and what to install."""
    source = (
        "from canary_core import EngineInfo, hookimpl\n"
        "@hookimpl\ndef canary_engine(): return EngineInfo.of('no-such-engine', '>=3')\n"
        "@hookimpl\ndef canary_demo(): return None\n"
    )
    distribution("canary-hollow", {"canary_hollow": source}, {"hollow": "canary_hollow"})
    with pytest.raises(PluginError, match=r"'hollow' supports no-such-engine >=3, which is not installed"):
        demo.engines("hollow")


def test_the_demo_asks_no_permission(distribution, monkeypatch):
    """Asking for a demo is enough: `CANARY_PLUGINS` need not name the plugin."""
    monkeypatch.delenv("CANARY_PLUGINS", raising=False)
    source = "from canary_core import hookimpl\n@hookimpl\ndef canary_demo(): return 'an engine'\n"
    distribution("canary-eager", {"canary_eager": source}, {"eager": "canary_eager"})
    assert demo.engines("eager") == ["an engine"]


def test_settings_of_the_environment_do_not_reach_the_demo(monkeypatch):
    """The demo means the same everywhere."""
    monkeypatch.setenv("CANARY_MODE", "raise")
    monkeypatch.setenv("CANARY_FAULTS", "lost_write")
    monkeypatch.setenv("CANARY_BYTES", "off")
    config: CanaryConfig = demo.default_config()
    assert (config.mode, config.faults, config.bytes) == ("log", "", "all")
