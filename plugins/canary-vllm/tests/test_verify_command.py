"""``canary ctl verify`` beside vLLM's engine core in a process of its own, as a user types it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import canary_core

pytestmark = [pytest.mark.timeout(600)]


def settings(folder: Path) -> dict[str, str]:
    """Variables of an engine and of the command beside it, with the socket in ``folder``."""
    sockets = folder / "c"
    sockets.mkdir(mode=0o700)
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests), str(Path(canary_core.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return {
        **os.environ, "CANARY_CONTROL_DIR": str(sockets), "PYTHONPATH": path, "CANARY_PLUGINS": "vllm",
        "CANARY_CONTROL": "write", "CANARY_SCRUB_BUDGET": "0", "CANARY_INCIDENT_DIR": str(folder / "incidents"),
    }  # fmt: skip


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.takes_turns("the same with one rank"))])
def test_running_requests_are_verified_from_another_process(ranks, tmp_path):
    """All that run, and one by name, each rank its shard; the name is that of the engine's core."""
    environment = settings(tmp_path)
    engine = subprocess.Popen(
        [sys.executable, "-m", "vllm_on_cpu.served_script", str(ranks)],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert engine.stdout is not None
        assert any(line == "ready\n" for line in engine.stdout)

        def verify(*arguments: str) -> "subprocess.CompletedProcess[str]":
            given = [sys.executable, "-m", "canary_core", "ctl", "verify", "--timeout", "120", *arguments]
            return subprocess.run(given, env=environment, capture_output=True, text=True, timeout=300, check=False)

        done = verify("--all", "--json")
        told = json.loads(done.stdout)
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(told) == ranks
        for process in told:
            verdicts = {answer["request"]: answer["verdict"] for answer in process["answers"]}
            # One may have ended meanwhile.
            assert "same" in verdicts.values()
            assert set(verdicts.values()) <= {"same", "unjudged"}
            sources = {layer["source"] for answer in process["answers"] for layer in answer["layers"]}
            assert {source.partition("/")[0] for source in sources} == {
                f"{half}.{layer}" for half in "kv" for layer in range(3)
            }
        unknown = verify("--request", "nobody")
        assert unknown.returncode == 2
        assert (
            unknown.stdout.count("nobody: unjudged, 0 tokens (no request of that name has KV in the cache just now")
            == ranks
        )
        assert "canary: there is no verdict on request 'nobody'; the reason stands beside it\n" in unknown.stderr
        assert engine.poll() is None
    finally:
        engine.communicate(timeout=200)


@pytest.mark.takes_turns("the command for running requests here; an idle engine in test_parked")
def test_an_idle_engine_verifies_what_ended_requests_left(tmp_path):
    """By the name that the client gave, and all; then, when weights have changed under the kept cache, it finds each of
    these prefixes by itself, as one incident."""
    environment = {**settings(tmp_path), "CANARY_RECOMPUTE": "100%", "CANARY_LOG_FORMAT": "json"}
    environment["CANARY_VIOLATION_LEVEL"] = "error"
    with (tmp_path / "log").open("w") as log:
        engine = subprocess.Popen(
            [sys.executable, "-m", "vllm_on_cpu.idle_script"],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    try:
        assert engine.stdin is not None
        assert engine.stdout is not None
        assert any(line == "idle\n" for line in engine.stdout)

        def verify(*arguments: str) -> "subprocess.CompletedProcess[str]":
            given = [sys.executable, "-m", "canary_core", "ctl", "verify", "--timeout", "120", *arguments]
            return subprocess.run(given, env=environment, capture_output=True, text=True, timeout=300, check=False)

        done = verify("--all-parked", "--json")
        (told,) = json.loads(done.stdout)
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(told["answers"]) == 30
        assert {(answer["verdict"], answer["tokens"], answer["parked"]) for answer in told["answers"]} == {
            ("same", 64, True)
        }
        done = verify("--prefix-of", "request 5")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "prefix of request 5: same, 64 tokens" in done.stdout
        done = verify("--prefix-of", "nobody")
        assert done.returncode == 2
        assert "prefix of nobody: unjudged, 0 tokens (nothing is remembered that it left" in done.stdout
        assert "there is no verdict on the prefix of request 'nobody'; the reason stands beside it" in done.stderr

        def tell(said: str) -> None:
            engine.stdin.write(f"{said}\n")
            engine.stdin.flush()
            assert engine.stdout.readline() == "done\n"

        def events(name: str) -> list[dict[str, str]]:
            lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if line.startswith("{")]
            return [line for line in lines if line["event"] == name]

        tell("change")
        done = verify("--prefix-of", "request 7")
        assert done.returncode == 1, done.stdout + done.stderr
        assert "prefix of request 7: differs, 64 tokens" in done.stdout
        found = set()
        while len(found) < 3:
            # Told by the engine alone, one after the other.
            found = {event["request"] for event in events("violation")} - {"request 7"}
            assert engine.poll() is None
            time.sleep(0.2)
        assert len(events("incident")) == 1
        tell("reset")
        done = verify("--prefix-of", "request 5")
        assert done.returncode == 2, done.stdout + done.stderr
        assert "request 5: gone, 0 tokens (0 of the 64 tokens that it left in the prefix cache are still" in done.stdout
    finally:
        engine.communicate(timeout=200)
