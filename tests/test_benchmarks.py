"""Benchmarks: every op has a case, no case is timed unless it equals the reference, reports render anywhere."""

import json
from dataclasses import fields, replace

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import flips, start, states, step
from benchmarks.cases import CASES
from benchmarks.equality import NotEqualError, require_equal, require_quiet
from benchmarks.measure import Result, timed
from benchmarks.setting import Setting
from canary_core.errors import ViolationError
from canary_core.ops.backends import Backend, torch_backend, triton_backend

CPU = torch.device("cpu")
NO_OPS = ("name", "row_steps", "compile_together", "compile_beside")
OPS = [field.name for field in fields(Backend) if field.name not in NO_OPS]


@pytest.mark.parametrize("op", OPS)
def test_every_op_is_measured(op):
    """An op of the back ends that no case times was forgotten."""
    assert any(op in case.ops for case in CASES.values()), f"add a case for {op} to benchmarks/cases.py"


@pytest.mark.takes_turns("other cases, and tests/ops/test_equal.py, which has every op")
@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_reference_in_every_case(name):
    """Each case, small, passes the equality that its speed depends on, with kernels on the interpreter."""
    setting = Setting.make(CASES[name].tiny(), CPU)
    require_equal(setting)
    assert setting.floor_bytes > 0


@pytest.mark.parametrize("op", OPS)
def test_a_wrong_kernel_gets_no_speed(op):
    """A kernel that does nothing is noticed before anything is timed."""
    case = next(case for case in CASES.values() if op in case.ops).tiny()
    broken = replace(triton_backend(), **{op: lambda *_: None})
    with pytest.raises(NotEqualError, match=op):
        require_equal(Setting.make(case, CPU), broken)


@pytest.mark.parametrize("name", CASES)
def test_what_is_timed_finds_nothing(name):
    """Launched again and again, as for its speed, each case has what its ops need of those before them in a step."""
    setting = Setting.make(CASES[name].tiny(), CPU)
    launch, _, prepare = timed(setting, torch_backend())
    for _ in range(2):
        if prepare is not None:
            prepare()
        launch()
    require_quiet(setting)


def test_clean_traffic_of_a_whole_step_raises_no_finding():
    """The whole-forward cases replay the same batches; with the written slots reset in between, that is clean."""
    whole = step.Step(step.DECODE.tiny(), CPU)
    require_equal(whole.setting)
    for _ in range(2):
        whole.setting.reset()
        whole.whole()
    whole.canary.drain()
    assert whole.canary.stats()["violations"] == 0
    assert whole.canary.stats()["unsure"] == 0


@pytest.mark.parametrize("interval", [1, 4])
def test_recurrent_states_are_compared_and_fingerprinted(interval):
    """The steps that are timed find nothing in clean states, read what they say they read, and find a flipped bit."""
    shape = states.States(rows=3, layers=2, ssm_bytes=4096, conv_bytes=96, spare_slots=2)
    decode = states.Decode(shape, interval, CPU)
    for _ in range(2):
        decode.as_prefilled()
        decode.pre()
        decode.before_post()
        decode.post()
    decode.canary.drain()
    assert decode.canary.stats()["violations"] == 0
    assert decode.canary.stats()["checked_bytes"] >= 2 * shape.state_bytes


def test_recurrent_states_go_on_for_a_whole_round():
    """The average is taken over steps that follow each other: nothing is found, each state is checked in each, and
    bytes are compared once a round; a bit that flips after a look is found."""
    decode = states.Decode(states.States(3, 2, 4096, 96), 4, CPU)
    for _ in range(8):
        decode.step()
    decode.canary.drain()
    stats = decode.canary.stats()
    assert (stats["violations"], stats["checked_slots"]) == (0, 3 * 8)
    assert stats["checked_bytes"] == 3 * decode.shape.state_bytes
    # As many as an interval of 256 has in its rounds: each step is ended, or Canary refuses to go on.
    for _ in range(1100):
        decode.step()
    while decode.canary.forwards % 4:
        decode.step()
    source = decode.canary.states[states.REGION].sources[-1]
    source.tensor[1:, 7] += 1
    with pytest.raises(ViolationError):
        decode.step()


def test_list_works_without_a_gpu(capsys):
    """``--list`` names every case."""
    assert command.main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in (*CASES, *step.STEPS) if name not in shown] == []


def test_an_unknown_case_is_an_error(capsys):
    """``--only`` with a name that nothing has lists the names there are."""
    assert command.main(["--only", "nonesuch"]) == 2
    assert "check/256x4096" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run all of them")
def test_no_gpu_is_said_clearly(capsys):
    """Without a GPU there are no numbers, real or made up."""
    assert command.main([]) == 2
    assert "need an NVIDIA GPU" in capsys.readouterr().out


@pytest.mark.gpu
def test_a_case_runs_on_the_gpu(tmp_path):
    """A case goes through equality, graph capture and report; whether its numbers are good is not a test's business."""
    raw = tmp_path / "raw.json"
    assert command.main(["--quick", "--no-builtin", "--only", "check/1x131072", "--json", str(raw)]) == 0
    assert json.loads(raw.read_text())["results"][0]["us"] > 0


def test_a_report_renders_from_its_file(tmp_path, capsys):
    """A JSON file gives table and page on any machine; a refused op shows no speed."""
    point = {"x": 1000, "pre_us": 1.0, "post_us": 2.0, "whole_us": 3.0, "bytes": 5}
    good = Result("a", "work a", 1000, 10.0, 9.0, 11.0, 0.1, 8.0, None, "≤ 25 µs", True, {"plan": 30.0, "verify": 60.0})
    report = {
        "machine": dict.fromkeys(("gpu", "memory_gib", "multiprocessors", "l2_mb", "python", "torch", "cuda"), 1)
        | dict.fromkeys(("triton", "canary", "commit", "date"), "1"),
        "command": "python -m benchmarks",
        "peak": {"read_gbps": 4500.0, "copy_gbps": 4200.0},
        "peer_version": "0.5.17",
        "results": [good.to_dict(), Result("b", "work b", refused="check differs").to_dict()],
        "steps": {"s": {"work": "whole", **point}},
        "curves": {"pool_slots": [point], "context_tokens": [point | {"refused": "why"}]},
        "host_us": {
            kind: dict.fromkeys(("pre_forward", "post_forward", "end_step", "all", "all_p90", "one_mm"), us)
            for kind, us in (("served", 3.0), ("scrubbed", 4.0))
        },
        "launches": {"check_kernel": 1.0, "Memcpy DtoH": 1.0},
        "start": {
            "cold": {"attach": 1.0, "warm_up": 0.5, "beside": 9.0, "finish": 2.0},
            "warm": {"attach": 1.0, "warm_up": 0.75, "beside": 0.0, "finish": 0.0},
            "here": {"attach": 1.0, "warm_up": 7.5, "beside": 0.0, "finish": 0.0},
        },
        "memory": step.memory(1000),
        "states": {"shape": "2 requests"}
        | dict.fromkeys(("bytes", "interval", "compare_us", "fingerprint_us", "average_us", "gbps"), 77),
    }
    source, page = tmp_path / "raw.json", tmp_path / "page.md"
    source.write_text(json.dumps(report))
    assert command.main(["--from", str(source), "--markdown", str(page)]) == 1
    text = page.read_text()
    assert "| a | 1 kB | 10.0 (9.0\u201311.0) | 0 | 0% | 8.0 |  | plan 30.0 + verify 60.0 | 9.0 | ≤ 25 µs | ✓ |" in text
    assert "| b |  | refused |" in text
    assert "check differs" in text
    assert "one in 77 looked at" in text
    assert "an empty Triton cache holds an engine up for 3.50 s: 1.00 to attach" in text
    assert "another process compiles for 9.00 s" in text
    assert "bar ≤ 3 s: ✗" in text
    assert "bar ≤ 0.5 s: ✗" in text
    assert "puts nothing off takes 8.50 s" in text


def test_a_start_is_measured_in_processes_of_its_own():
    """On a CPU nothing is compiled; what fails there is told."""
    parts = ["attach", "warm_up", "beside", "finish"]
    measured = start.measure("cpu")
    assert {kind: [*seconds] for kind, seconds in measured.items()} == dict.fromkeys(("cold", "warm", "here"), parts)
    with pytest.raises(RuntimeError, match="nowhere beside failed"):
        start.measure("nowhere")


def test_our_memory_is_within_its_bar():
    """Everything a Canary allocates for a Llama-8B pool is under 1 % of the pool."""
    assert step.memory()["met"]


def test_flipped_bits_are_told_without_an_engine():
    """The latency script, on a tiny pool: each bit is told, of running and of parked slots, nothing else is, and none
    took longer than the bound that Canary gave meanwhile, and the reads."""
    shape = flips.Shape(pool_bytes=600 * 2 * 2 * 64, layers=2, row_bytes=64, request_tokens=12, step_s=0.0)
    decodes = flips.Decodes(shape, CPU, scrub_budget="2KiB")
    found = flips.measure(decodes, flips=4, most_s=30)
    for sort in flips.SORTS:
        assert (found[sort]["flips"], found[sort]["told"]) == (4, 4)
    assert found["other_findings"] == found["unasked"] == []
    assert found["live_period_s"] > 0


def test_a_pool_in_which_nothing_is_parked_has_running_slots_alone():
    """So is a pool with all of its slots in order."""
    shape = flips.Shape(pool_bytes=300 * 2 * 64, layers=1, row_bytes=64, parked=0.0, request_tokens=10, step_s=0.0,
                        scattered=False)  # fmt: skip
    found = flips.measure(flips.Decodes(shape, CPU, scrub_budget="2KiB"), flips=2, most_s=30)
    assert found["running"]["told"] == 2
    assert "parked" not in found
