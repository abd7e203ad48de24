"""The soak itself: `make soak` serves for minutes; here it must ask the same again, and fail when it should."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from soak.plan import Shape, plan
from soak.results import Result, show, totals
from soak.setups import setups

ROOT = Path(__file__).parents[1]


def soak(out: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs it, as a user does."""
    folders = ["--out", str(out), "--work", str(out / "work")]
    return subprocess.run(
        [sys.executable, "tests/soak", *arguments, *folders], capture_output=True, text=True, cwd=ROOT, check=False
    )


def test_a_round_is_the_same_for_its_seed():
    """Whoever repeats a seed asks what was asked: in whichever order rounds are made, and for this setup only."""
    shape = Shape()
    rounds = [plan(shape, 7, "vllm/llama", number) for number in range(12)]
    assert [plan(shape, 7, "vllm/llama", number) for number in reversed(range(12))] == rounds[::-1]
    assert plan(shape, 8, "vllm/llama", 3) != rounds[3]
    assert plan(shape, 7, "vllm/mla", 3) != rounds[3]


def test_rounds_have_what_they_are_for():
    """Prompts of all lengths within the shape, with shared beginnings, some asked twice; aborts and flushes."""
    shape = Shape(prompt=60, new=20, requests=8)
    rounds = [plan(shape, 1, "any", number) for number in range(60)]
    asked = [one for each in rounds for one in each.asked]
    assert len({one.name for one in asked}) == len(asked) == 60 * 8
    assert all(1 <= len(one.tokens) <= 60 and 1 <= one.new <= 20 for one in asked)
    assert all(3 <= token < shape.vocabulary for one in asked for token in one.tokens)
    assert all(each.asked[0].turn == 0 for each in rounds)
    assert [one.tokens for one in rounds[2].asked] == [one.tokens for one in rounds[1].asked]
    heads = [one.tokens[:10] for one in rounds[0].asked + rounds[3].asked]
    assert len(set(heads)) < len(heads)
    assert 10 < sum(one.aborted is not None for one in asked) < 200
    assert {one.salt for one in asked} == {"", "salt-a", "salt-b"}
    assert 2 < sum(each.flush for each in rounds) < 40


def test_results_are_added_up(tmp_path):
    """A setup without forwards is no good one; what is written is read again; the totals come last."""
    good = Result("vllm/a", 5, "cpu", state="done", rounds=2, stats={"forwards": 40, "checked_slots": 100})
    idle = Result("vllm/b", 5, "cpu", state="done")
    found = Result("vllm/c", 5, "cpu", state="done", violations=1, stats={"forwards": 2})
    found.fail(3, "python3 tests/soak --seed 5 --rounds 4", {"found": "bytes"})
    lacking = Result("vllm/d", 5, "cpu", state="left out: this processor has no AVX-512")
    assert [one.good for one in (good, idle, found, lacking)] == [True, False, False, True]
    found.write(tmp_path / "c.json")
    assert Result.read(tmp_path / "c.json") == found
    assert Result.read(tmp_path / "d.json") is None
    total = totals([good, idle, found])
    assert (total["forwards"], total["violations"], total["failed_setups"]) == (42, 1, 2)
    with (tmp_path / "table").open("w") as file:
        show([good, idle, found], Console(file=file, width=220))
    lines = tmp_path.joinpath("table").read_text().splitlines()
    assert "42" in lines[-2]
    assert "2 failed" in lines[-2]


def test_eight_engines_fit_one_gpu():
    """On a GPU each setup of vLLM has a pool of a size of its own, so that eight at a time are side by side."""
    chosen = setups("cuda", ("vllm",))
    assert len(chosen) == 11
    assert sum(setup.options["kv_cache_memory_bytes"] for setup in chosen.values()) <= 16 << 30
    assert all(setup.shape.prompt + setup.shape.new <= setup.options["max_model_len"] for setup in chosen.values())


@pytest.mark.timeout(400)
def test_a_planted_flip_fails_it_and_the_seed_is_told(tmp_path):
    """Clean rounds of a real engine pass, with forwards counted and answers compared; one bit that is flipped in the
    engine's own memory fails the soak, which prints the seed and the command that repeats it."""
    pytest.importorskip("transformers", reason="the engine that the soak runs here")
    chosen = ("--setups", "transformers/llama", "--seed", "11", "--rounds", "2", "--seconds", "120")
    clean = soak(tmp_path / "clean", *chosen)
    told = json.loads((tmp_path / "clean" / "soak.json").read_text())
    assert clean.returncode == 0, clean.stdout + clean.stderr
    assert told["totals"]["forwards"] > 20
    assert told["totals"]["compared"] > 3
    assert told["totals"]["different"] == told["totals"]["violations"] == 0
    planted = soak(tmp_path / "planted", *chosen, "--plant", "1")
    assert planted.returncode == 1
    assert planted.stdout.startswith("seed 11,")
    again = next(line.partition("again: ")[2] for line in planted.stdout.splitlines() if "again: " in line)
    assert again == "python3 tests/soak --device cpu --setups transformers/llama --seed 11 --plant 1 --rounds 2"
    found = json.loads((tmp_path / "planted" / "soak.json").read_text())["setups"][0]["failures"]
    assert {(one["fields"]["kind"], one["round"], one["seed"]) for one in found} == {("bytes", 1, 11)}


def test_an_unknown_setup_is_refused(tmp_path):
    """With the names that there are."""
    refused = soak(tmp_path, "--setups", "transformers/lama")
    assert refused.returncode == 2
    assert "transformers/llama" in refused.stdout
