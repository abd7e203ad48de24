"""Workers that are not guarded while the scheduler's process is: told, and vLLM serves on. Real engines of two workers;
what is broken in one of them is broken by a worker class of the test's own."""

import pytest
from vllm_on_cpu.scripts import said_by

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("processes")]
COVERED_BY = "tests/adapters/test_roll_call.py, and one of these"
RANKS, REPLICAS = [(0, 0), (0, 1)], [(0, 0), (1, 0)]
WHOSE = {"worker": RANKS, "stage": RANKS, "scheduler": RANKS, "replica": REPLICAS}
"""Replica and rank of the two workers."""
BROKEN = {
    "plugins": "does not name vllm",
    "settings": "CANARY_READ_CHECK is '64', here '0'",
    "package": "canary-vllm does not answer there: ",
    "version": "runs canary 0.0.9 with canary-vllm 0.0.9",
}


def run(broken, mode="log"):
    """Answered tokens and failure of an engine, and what Canary told in all of its processes."""
    settings = {"CANARY_MODE": mode, "CANARY_LOG_FORMAT": "json", "CANARY_STATS_INTERVAL": "0"}
    return said_by("workers_script", broken, plugins="vllm", **settings)


@pytest.mark.takes_turns("tests/adapters/test_roll_call.py, and two guarded ranks in test_processes")
@pytest.mark.parametrize(
    "broken", [n if n == "plugins" else pytest.param(n, marks=pytest.mark.beyond_ci(COVERED_BY)) for n in BROKEN]
)
def test_a_worker_that_is_not_guarded_alike_is_told(broken):
    """``CANARY_PLUGINS`` not set in one worker's process, another setting there, no package, another release: one
    event says which rank and what it lacks, and both workers serve."""
    told, events = run(broken)
    assert told == {"answers": 4 * 12}
    (event,) = [e for e in events if e["event"] == "workers_unguarded"]
    assert event["level"] == "error"
    assert event["ranks"] == [1]
    assert event["workers"] == 2
    assert BROKEN[broken] in event["reason"]


@pytest.mark.beyond_ci("test_processes: tp2")
def test_two_guarded_workers_are_silent():
    """Both are asked and give their word with each output: no warning, and each worker's summary says that all tokens
    that the scheduler gave out were guarded."""
    told, events = run("nothing")
    assert told == {"answers": 4 * 12}
    assert [e for e in events if e["level"] in ("warning", "error")] == []
    summaries = [e for e in events if e["event"] == "summary"]
    assert [e["computed_tokens"] == e["guarded_tokens"] > 200 for e in summaries] == [True, True]


@pytest.mark.beyond_ci(COVERED_BY)
def test_raise_mode_does_not_start_with_an_unguarded_worker():
    """vLLM's start fails, with the reason."""
    told, _ = run("raise", mode="raise")
    assert told["answers"] == 0
    assert "AttachError" in told["failed"]
    assert "rank 1" in told["failed"]


@pytest.mark.beyond_ci("test_followed: whose guard it is; the core's own tests of replicas")
def test_replicas_are_told_apart():
    """Two data-parallel replicas: both are rank 0, of replica 0 and 1, each has its own address for metrics, counts its
    own tokens, and a fault aims at one."""
    settings = {"CANARY_METRICS_LISTEN": "127.0.0.1:19471", "CANARY_FAULTS": "real_kv_used:replica=1,warmup=2"}
    told, events = said_by("replicas_script", plugins="vllm", CANARY_LOG_FORMAT="json", **settings)
    assert told == {"answers": 8 * 16}
    attached = [(e["rank"], e["replica"], e["model"]) for e in events if e["event"] == "attached"]
    assert sorted(attached) == [(0, 0, "tiny"), (0, 1, "tiny")]
    places = {(e["replica"], e["place"]) for e in events if e["event"] == "metrics" and "http" in e["place"]}
    assert {replica for replica, _ in places} == {0, 1}
    assert len({place for _, place in places}) == 2
    assert {e["replica"] for e in events if e["event"] in ("fault_injected", "incident")} == {1}
    summaries = [e for e in events if e["event"] == "summary"]
    assert sorted(e["replica"] for e in summaries) == [0, 1]
    assert all(e["computed_tokens"] == e["guarded_tokens"] == 4 * (55 + 15) for e in summaries)
    assert [e for e in events if e["event"] == "workers_unguarded"] == []


@pytest.mark.beyond_ci("what vLLM does; an engine that ends: test_followed")
@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("worker", "report"),
        ("replica", "report"),
        ("worker", "protect"),
        ("stage", "protect"),
        ("scheduler", "protect"),
        ("replica", "protect"),
    ],
)
def test_an_engine_that_loses_a_process_ends_as_a_whole(what, value):
    """vLLM notices at once that a worker, the scheduler's process, or the engine core of a replica, was killed with -9:
    it names the process in its log, ends all others, and fails each request, so that nothing is served unguarded, and
    nothing is left. Canary raises no alarm; it tells the summary of those that have the time. With protect, requests
    are computed again meanwhile; a scheduler that has stopped answering makes no worker wait."""
    settings = {"CANARY_LOG_FORMAT": "json", "CANARY_STATS_INTERVAL": "0", "CANARY_ON_VIOLATION": value}
    told, events = said_by("killed_script", what, plugins="vllm", **settings)
    assert told["answered"][1] == 0
    assert {name for name, _ in told["failed"]} == {"EngineDeadError"}
    assert len(told["failed"]) == 8 - told["answered"][0]
    assert max(seconds for _, seconds in told["failed"]) < 60
    # The next process sweeps the control socket of one that was killed.
    assert [name for name in told["left"] if not name.endswith(".sock")] == []
    trouble = {e["event"] for e in events if e["level"] in ("warning", "error")}
    if value == "report":
        assert trouble == set()
    else:
        assert "recomputed" in trouble
        assert trouble <= {"incident", "diagnosis", "recomputed", "quarantined"}
    assert sorted((e["replica"], e["rank"]) for e in events if e["event"] == "attached") == WHOSE[what]
