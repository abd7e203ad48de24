"""Two tensor-parallel ranks, each a process of SGLang's own, compute requests again: both at the same turns, whoever
asks, and each judges its own shard."""

import json

import pytest
from engines.ranks import phase, run, serve, told
from tools.recomputes import prompt

from canary_adapters.lessons import AT_ONCE

pytestmark = [pytest.mark.timeout(1500), pytest.mark.first]

PLUGIN = ["recomputes = tools.rank_recomputes:install"]
OPTIONS = {"tp_size": 2, "model": "llama", "dtype": "float32", "max_total_tokens": 1536, "max_running_requests": 6}
QUIET = {
    "CANARY_PLUGINS": "sglang,ranks_witness", "CANARY_READ_CHECK": "0", "CANARY_SCRUB_BUDGET": "0",
    "CANARY_STATS_INTERVAL": "4",
}  # fmt: skip
ALL = {**QUIET, "CANARY_RECOMPUTE": "100%"}
LENGTHS = (35, 90, 50, 150, 40, 70)
NEW = 44
BESIDE = pytest.mark.takes_turns("one process in test_recompute, and two ranks that act alike in test_ranks")
REQUESTS = 36


def traffic(seed, count):
    """Prompts of up to three chunks, and many hits."""
    shared = prompt("shared", 60)
    hits = [shared[: 20 + 5 * (n % 8)] if n % 3 == 0 else [] for n in range(count)]
    return [[*hit, *prompt(f"{seed} {n}", LENGTHS[n % len(LENGTHS)])] for n, hit in enumerate(hits)]


def long(seed):
    """Two prompts whose second computation takes several chunks."""
    return [prompt(f"{seed} {n}", 150) for n in range(2)]


def tokens(done):
    """By phase and request."""
    return [[request["tokens"] for request in phase] for phase in done]


def counts(folder, rank):
    """The last ones told."""
    return told(folder, rank, "compared")[-1]


def alike(folder):
    """Whether both ranks ran the same batches; the last one may be cut short by the engine's end."""
    ours, theirs = (told(folder, rank, "forward") for rank in (0, 1))
    both = min(len(ours), len(theirs))
    return abs(len(ours) - len(theirs)) <= 1 and ours[:both] == theirs[:both]


def names(folder, rank):
    """Of events."""
    return {event["event"] for event in told(folder, rank, "event")}


@BESIDE
@pytest.mark.where(pytest.mark.beyond_ci("the same with the overlap scheduler"), loop="plain")
@pytest.mark.parametrize("loop", ["overlap", "plain"])
def test_both_ranks_compute_the_same_requests_again(tmp_path, loop):
    """Clean traffic with hits and chunks is well, and the answers are those of an engine without Canary, also where one
    rank alone asks, where a request is retracted or aborted by its client while it is computed again, and under
    load."""
    requests = traffic("clean", REQUESTS)
    phases = [
        *[phase("nothing", requests[n : n + 3], NEW) for n in range(0, len(requests), 3)],
        phase("ask 1", long("ask"), 80),
        phase("retract", long("retract"), 80),
        phase("nothing", traffic("load", 12), 20),
        phase("abort", long("abort"), 80),
    ]
    options = {**OPTIONS, "disable_overlap_schedule": loop == "plain"}
    plain = serve(tmp_path / "plain", options, [{**p, "control": "nothing"} for p in phases[:-1]], PLUGIN)
    folder = tmp_path / "guarded"
    done = serve(folder, options, phases, PLUGIN, **ALL)
    assert tokens(done)[:-1] == tokens(plain)
    assert sorted(len(request["tokens"]) < 80 for request in done[-1]) == [False, True]
    assert alike(folder)
    for rank in (0, 1):
        assert {"disabled", "hooks_left_out", "recompute_off", "reporting_failed"}.isdisjoint(names(folder, rank))
        assert told(folder, rank, "violation") == []
        assert counts(folder, rank)["recomputed_requests"] >= REQUESTS
        assert counts(folder, rank)["recompute_same"] >= REQUESTS // 2
    (answer,) = map(json.loads, folder.joinpath("answers").read_text().splitlines())
    assert (answer["rank"], [one["verdict"] for one in answer["answers"]]) == (1, ["same", "same"])


@BESIDE
def test_ranks_without_a_fresh_request_learn_from_their_own(tmp_path):
    """All requests have a hit: both ranks begin, end and judge the same lessons, so that each one has verdicts on its
    shard; nothing of a lesson is an answer."""
    head = prompt("head", 48)
    hits = [[*head, *prompt(f"tail {n}", 20 + 7 * (n % 3))] for n in range(15)]
    phases = [phase("nothing", [head], 1), *[phase("nothing", hits[n : n + 3], 150) for n in range(0, len(hits), 3)]]
    plain = serve(tmp_path / "plain", OPTIONS, phases, PLUGIN)
    folder = tmp_path / "guarded"
    done = serve(folder, OPTIONS, phases, PLUGIN, **ALL)
    assert tokens(done) == tokens(plain)
    assert min(request["cached"] for served in done[1:] for request in served) >= len(head)
    assert alike(folder)
    for rank in (0, 1):
        assert {"disabled", "hooks_left_out", "recompute_off", "reporting_failed"}.isdisjoint(names(folder, rank))
        assert told(folder, rank, "violation") == []
        counted = counts(folder, rank)
        assert counted["recompute_lessons"] >= AT_ONCE
        assert counted["recompute_taught"] >= AT_ONCE
        assert counted["recompute_same"] >= len(hits)


@BESIDE
def test_what_one_rank_computes_wrongly_is_told_by_that_rank(tmp_path):
    """Attention of one layer is scaled wrongly in it, in all forwards: the other rank says nothing."""
    folder = tmp_path / "guarded"
    serve(folder, OPTIONS, [phase("scale 1", long("scale"), 100)], PLUGIN, **ALL)
    assert told(folder, 0, "violation") == []
    found = told(folder, 1, "violation")
    assert {(v["kind"], v["layer"], v["rule"], v["rank"]) for v in found} == {("attention", 1, "scale", 1)}


OFF = [phase("nothing", long("off"), 60), phase("nothing", long("ask"), 60), phase("nothing", long("on"), 20)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What an engine without Canary says."""
    return tokens(serve(tmp_path_factory.mktemp("plain") / "plain", OPTIONS, OFF, PLUGIN))


@BESIDE
def test_idle_ranks_prove_a_full_cache_alike(tmp_path):
    """Both evict the same part of the pool for it, and compute the same requests again in the same slots."""
    slots, folder = 7000, tmp_path / "guarded"
    full = [prompt(f"full {n}", 53) for n in range(slots // 60 + 10)]
    # One after the other, the last ones leave less free than one of them needs.
    phases = [phase("nothing", full, 8), *[phase("nothing", [prompt(n, 20)], 8) for n in range(4)]]
    phases[-1]["idle_s"] = 10
    serve(folder, {**OPTIONS, "max_total_tokens": slots}, phases, PLUGIN, **ALL)
    assert alike(folder)
    for rank in (0, 1):
        assert told(folder, rank, "violation") == []
        assert counts(folder, rank)["recomputed_requests"] >= 10
        assert 0 < counts(folder, rank)["parked_evicted"] <= len(phases) * slots // 100
        assert counts(folder, rank)["parked_evicted"] == counts(folder, 0)["parked_evicted"]


@BESIDE
@pytest.mark.where(pytest.mark.beyond_ci("the same where Canary is switched off"), how="fail")
@pytest.mark.parametrize("how", ["off", "fail"])
def test_the_end_of_one_ranks_canary_ends_it_on_both(tmp_path, how, plain):
    """Between two chunks of an internal request: the other rank learns of it before anything is ended, says so, and
    whoever asks there is told. The engine serves on as without Canary."""
    phases = [{**OFF[0], "control": f"{how} 1"}, {**OFF[1], "control": "ask 0"}, OFF[2]]
    folder = tmp_path / "guarded"
    done = serve(folder, OPTIONS, phases, PLUGIN, **ALL)
    assert tokens(done) == plain
    reasons = [event["reason"] for event in told(folder, 0, "event") if event["event"] == "recompute_off"]
    assert reasons == ["Canary was switched off on rank 1"]
    (answer,) = map(json.loads, folder.joinpath("answers").read_text().splitlines())
    assert {(one["verdict"], one["reason"]) for one in answer["answers"]} == {("unjudged", reasons[0])}
    assert "disabled" not in names(folder, 0)


@BESIDE
def test_a_rank_that_does_not_take_part_is_not_waited_for(tmp_path):
    """It has another setting: nothing is computed again, both say so, and both serve."""
    unguard = ["unguard = tools.ranks_witness:unguard"]
    other = '{"CANARY_RECOMPUTE": "50%"}'
    folder = tmp_path / "guarded"
    phases = [phase("ask 0", long("ask"), 60)]
    (done,) = serve(folder, OPTIONS, phases, [*PLUGIN, *unguard], **ALL, RANKS_UNGUARDED=other)
    assert [request["status"] for request in done] == [200, 200]
    for rank in (0, 1):
        (event,) = [event for event in told(folder, rank, "event") if event["event"] == "recompute_off"]
        assert "not all ranks" in event["reason"]
        assert not any("recomputed_requests" in counted for counted in told(folder, rank, "compared"))
    (answer,) = map(json.loads, folder.joinpath("answers").read_text().splitlines())
    assert {one["verdict"] for one in answer["answers"]} == {"unjudged"}


@pytest.mark.beyond_ci("SGLang's own end of an engine that has lost a rank")
def test_an_engine_that_loses_a_rank_ends(tmp_path):
    """It is killed between two chunks of an internal request: nobody waits for its word."""
    folder = tmp_path / "killed"
    assert run(folder, OPTIONS, [phase("kill 1", long("kill"), 60)], PLUGIN, **ALL) != 0
    assert "PHASE" not in folder.joinpath("log").read_text(errors="replace")
    assert told(folder, 0, "forward")
