"""Two ranks, each a process of SGLang's own: one of them is corrupted, and those act that schedule the same batches."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.ranks import phase, serve, told

pytestmark = [pytest.mark.timeout(900), pytest.mark.first]

R = random.Random(0)
SHARED = [R.randrange(3, 250) for _ in range(30)]
TRAFFIC = [SHARED[: R.randrange(12, 30)] + [R.randrange(3, 250) for _ in range(10)] for _ in range(6)]
OTHERS = [[R.randrange(3, 250) for _ in range(20)] for _ in range(6)]


DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


def two_ranks(device: str, **options: Any) -> dict[str, Any]:
    """Options of an engine with two ranks. A CPU has both; GPUs one each."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, there are {torch.cuda.device_count()}")
    # How the ranks add up isn't what is tested: NCCL alone, which needs no multicast of NVLink.
    on_gpus = dict(device="cuda", disable_custom_all_reduce=True, enforce_disable_flashinfer_allreduce_fusion=True)
    return {"tp_size": 2, **options, **(on_gpus if device == "cuda" else {})}


def serve_twice(
    folder: Path, options: dict[str, Any], phases: list[dict[str, Any]], **settings: str
) -> tuple[Path, list[Any], list[Any], list[Any]]:
    """As `serve`, unguarded and undisturbed, then guarded. Gives the guarded one's folder, what came of its phases,
    each request's tokens in them, and those that were to be expected."""
    alone = "device" not in options and options.get("enable_dp_attention")
    plugins = ["data_parallel = data_parallel:install"] if alone else []
    plain = serve(folder / "plain", options, [{**p, "control": "nothing"} for p in phases], plugins, **settings)
    guard = {
        "CANARY_PLUGINS": "sglang,ranks_witness",
        "CANARY_ON_VIOLATION": "quarantine",
        "CANARY_SCRUB_BUDGET": "8MiB",
    }
    guarded = serve(folder / "guarded", options, phases, plugins, **guard, **settings)
    tokens, expected = ([[request["tokens"] for request in done] for done in served] for served in (guarded, plain))
    return folder / "guarded", guarded, tokens, expected


@pytest.mark.parametrize("device", DEVICES)
def test_one_rank_is_corrupted_and_both_act(tmp_path, device):
    """Clean traffic raises nothing on either rank. Then rank 1's part of an idle cached token breaks, and later that of
    a running request: only rank 1 finds it and says so; both ranks evict the same tokens and abort the same request, in
    the same turn; the client of that may try again. They go on with the same batches, and all that is served is what an
    unguarded engine serves."""
    phases = [
        phase("nothing", TRAFFIC, 12),
        phase("1 cached", OTHERS[:1], 60),
        phase("nothing", TRAFFIC, 12),
        phase("2 running", OTHERS[:2], 60),
        phase("nothing", TRAFFIC, 12),
    ]
    model, last_layer = {"cpu": ("llama", 2), "cuda": ("gpu_llama", 3)}[device]
    options = two_ranks(device, model=model)
    folder, guarded, tokens, expected = serve_twice(tmp_path, options, phases)
    assert [tokens[n] for n in (0, 2, 4)] == [expected[n] for n in (0, 2, 4)]

    cached, running = told(folder, 1, "broken")
    assert told(folder, 0, "violation") == []
    found = [(v["kind"], v["layer"], v["half"], v["slot"], v["rank"]) for v in told(folder, 1, "violation")]
    assert found == [("bytes", last_layer, "v", broken["slot"], 1) for broken in (cached, running)]
    assert sorted(request["status"] for request in guarded[3]) == [200, 503]
    (kept,) = [n for n, request in enumerate(guarded[3]) if request["status"] == 200]
    assert tokens[3][kept] == expected[3][kept]

    acts = [[e for e in told(folder, rank, "event") if e["event"] in ("quarantined", "aborted")] for rank in (0, 1)]
    assert [[e.pop("rank") for e in events] for events in acts] == [[rank] * len(acts[0]) for rank in (0, 1)]
    assert len({e.pop("gpu", None) for events in acts for e in events}) == (1 if device == "cpu" else 2)
    assert acts[0] == acts[1]
    assert [(e["event"], e["slot"]) for e in acts[0]][:2] == [
        ("quarantined", cached["slot"]),
        ("aborted", running["slot"]),
    ]
    assert acts[0][1]["request"] == running["request"]
    assert told(folder, 0, "forward") == told(folder, 1, "forward")
    names = {e["event"] for rank in (0, 1) for e in told(folder, rank, "event")}
    assert names.isdisjoint({"disabled", "quarantine_failed", "reporting_failed", "silence"})


@pytest.mark.beyond_ci("a lost write of one engine, and a finding of one rank that both act on")
@pytest.mark.parametrize("device", DEVICES)
def test_a_lost_write_is_told_by_both_ranks(tmp_path, device):
    """Tokens whose embedding is on rank 1 are written over tokens whose embedding is on rank 0. Made-up weights are the
    same on both ranks, so for each token there is one of the other rank with a bit-identical row, which leaves V as it
    was: both ranks dismiss those, and tell all others of the write that is lost."""
    model, half, pool = {"cpu": ("llama", 128, 512), "cuda": ("gpu_llama", 16000, 4096)}[device]
    of_rank_0, of_rank_1 = (
        [[first + R.randrange(3, 23) for _ in range(60)] for _ in range(pool // 40)] for first in (0, half)
    )
    options = two_ranks(device, model=model, max_total_tokens=pool)
    folder = tmp_path / "guarded"
    phases = [phase("nothing", of_rank_0, 1), phase("lost", of_rank_1, 1)]
    serve(folder, options, phases, CANARY_PLUGINS="sglang,ranks_witness", CANARY_INCIDENT_TOKENS="true")
    for rank in (0, 1):
        events = told(folder, rank, "event")
        (lost,) = [e for e in events if e["event"] == "fault_injected"]
        dismissed = [e for e in events if e["event"] == "dismissed"]
        assert {e["token"] - e["stored_token"] for e in dismissed} == {half}
        alike = {e["slot"] for e in dismissed if (e["step"], e["source"]) == (lost["step"], lost["source"])}
        # A token that is alike to the one whose bytes are still there leaves them as they are, too, in a later step.
        found = [v for v in told(folder, rank, "violation") if v["step"] == lost["step"]]
        assert {v["slot"] for v in found} == set(lost["slots"]) - alike
        assert {(v["kind"], v["source"]) for v in found} == {("lost_write", lost["source"])}
        assert all(v["token"] >= half > v["stored_token"] for v in found)


UNGUARD = ["unguard = tools.ranks_witness:unguard"]


@pytest.mark.takes_turns("actions/test_roll_call.py, without an engine, and canary-vllm's test_workers")
@pytest.mark.where(pytest.mark.beyond_ci("a rank without Canary"), other='{"CANARY_READ_CHECK": "0"}')
@pytest.mark.parametrize(
    ("other", "said"),
    [
        ('{"CANARY_PLUGINS": ""}', "rank 1 has not said that it is guarded"),
        ('{"CANARY_READ_CHECK": "0"}', "CANARY_READ_CHECK is '0', here '-1'"),
    ],
)
def test_a_rank_that_is_not_guarded_is_told(tmp_path, other, said):
    """Rank 1 runs without Canary, or with other settings than rank 0, as on a machine with another environment. Rank 0
    says so; nobody waits for a rank that is not there, also where findings are to be acted on, and both serve on."""
    guard = dict(CANARY_PLUGINS="sglang,ranks_witness", CANARY_ON_VIOLATION="quarantine", CANARY_READ_CHECK="-1")
    folder = tmp_path / "guarded"
    options = two_ranks("cpu", model="llama")
    (done,) = serve(folder, options, [phase("nothing", TRAFFIC[:3], 4)], UNGUARD, **guard, RANKS_UNGUARDED=other)
    assert [request["status"] for request in done] == [200] * 3
    events = told(folder, 0, "event")
    (event,) = [e for e in events if e["event"] == "workers_unguarded"]
    assert (event["ranks"], event["workers"]) == ([1], 2)
    assert said in event["reason"]
    failed = [e["reason"] for e in events if e["event"] == "quarantine_failed"]
    assert [reason[:38] for reason in failed] == (
        ["not all ranks act on findings (CANARY_"] if "PLUGINS" in other else []
    )
    assert folder.joinpath("rank1.jsonl").exists() == ("PLUGINS" not in other)


@pytest.mark.beyond_ci("the same in log mode")
def test_in_raise_mode_an_engine_with_an_unguarded_rank_does_not_serve(tmp_path):
    """The first batch waits until it is known, and the engine ends."""
    guard = dict(CANARY_PLUGINS="sglang,ranks_witness", CANARY_MODE="raise", RANKS_UNGUARDED='{"CANARY_PLUGINS": ""}')
    folder = tmp_path / "guarded"
    with pytest.raises(AssertionError):
        serve(folder, two_ranks("cpu", model="llama"), [phase("nothing", TRAFFIC[:1], 4)], UNGUARD, **guard)
    log = folder.joinpath("log").read_text()
    assert "AttachError: workers are not guarded: rank 1 has not said that it is guarded" in log
    assert "PHASE" not in log
    assert [e["ranks"] for e in told(folder, 0, "event") if e["event"] == "workers_unguarded"] == [[1]]


BY_TURNS = dict(dp_size=2, enable_dp_attention=True, attention_backend="triton", load_balance_method="round_robin")


@pytest.mark.beyond_ci("two tensor-parallel ranks")
@pytest.mark.parametrize("device", DEVICES)
def test_with_data_parallel_attention_each_rank_acts_for_itself(tmp_path, device):
    """Each rank schedules requests of its own, in step with the other, pads its batches to the other's and idles where
    it has none. Clean traffic raises nothing on either. Then an idle cached token of rank 1 breaks, and later a running
    request of it: rank 1 finds, evicts and aborts; rank 0, whose slots have the same numbers, does nothing of that."""
    # On a GPU findings are read every few steps; on a CPU each step takes long.
    model, last_layer, long = {"cpu": ("deepseek_v2", 1, 16), "cuda": ("gpu_deepseek_v2", 3, 60)}[device]
    phases = [
        phase("nothing", TRAFFIC[:6], 6),
        phase("nothing", TRAFFIC[:1], 6),
        phase("1 cached", OTHERS[:2], long),
        phase("nothing", TRAFFIC[:6], 6),
        phase("2 running", OTHERS[2:], long),
        phase("nothing", TRAFFIC[:6], 6),
    ]
    interpreted = {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"} if device == "cpu" else {}
    options = two_ranks(device, model=model, **BY_TURNS, **({"dtype": "float32"} if device == "cpu" else {}))
    folder, guarded, tokens, expected = serve_twice(tmp_path, options, phases, **interpreted)
    assert [tokens[n] for n in (0, 1, 2, 3, 5)] == [expected[n] for n in (0, 1, 2, 3, 5)]

    cached, running = told(folder, 1, "broken")
    assert told(folder, 0, "violation") == []
    found = [(v["kind"], v["layer"], v["half"], v["slot"], v["rank"]) for v in told(folder, 1, "violation")]
    assert found == [("bytes", last_layer, "kv", broken["slot"], 0) for broken in (cached, running)]
    about = [{(e["replica"], e["rank"]) for e in told(folder, n, "event") if "replica" in e} for n in (0, 1)]
    assert about == [{(0, 0)}, {(1, 0)}]
    assert sorted(request["status"] for request in guarded[4]) == [200, 200, 200, 503]
    kept = [n for n, request in enumerate(guarded[4]) if request["status"] == 200]
    assert [tokens[4][n] for n in kept] == [expected[4][n] for n in kept]

    acts = [[e for e in told(folder, rank, "event") if e["event"] in ("quarantined", "aborted")] for rank in (0, 1)]
    assert acts[0] == []
    assert [(e["event"], e["slot"]) for e in acts[1]][:2] == [
        ("quarantined", cached["slot"]),
        ("aborted", running["slot"]),
    ]
    assert acts[1][1]["request"] == running["request"]
    forwards = [told(folder, rank, "forward") for rank in (0, 1)]
    assert all(forwards)
    assert len(set(forwards[0]) & set(forwards[1])) < min(map(len, forwards))
    names = {e["event"] for rank in (0, 1) for e in told(folder, rank, "event")}
    assert names.isdisjoint({"disabled", "quarantine_failed", "reporting_failed", "silence", "unguarded_forward"})
