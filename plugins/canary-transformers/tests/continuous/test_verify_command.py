"""``canary ctl verify`` beside a running manager of continuous batching, as a user types it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import canary_core


def test_running_requests_are_verified_from_another_process(tmp_path):
    """All that run, as JSON, and one by name, with the table of the Python call; and what ended ones left. The engine
    serves on."""
    folder = tmp_path / "c"
    folder.mkdir(mode=0o700)
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(Path(canary_core.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "CANARY_CONTROL_DIR": str(folder), "PYTHONPATH": path}
    command = [sys.executable, "-m", "canary_core", "ctl", "verify"]
    engine = subprocess.Popen(
        [sys.executable, "-m", "tiny.served_script"],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "ready\n"

        def verify(*arguments: str) -> "subprocess.CompletedProcess[str]":
            given = [*command, "--timeout", "120", *arguments]
            return subprocess.run(given, env=environment, capture_output=True, text=True, timeout=200, check=False)

        for _ in range(2):
            done = verify("--all", "--json")
            (told,) = json.loads(done.stdout)
            assert "error" not in told, told
            verdicts = {answer["request"]: answer["verdict"] for answer in told["answers"]}
            assert set(verdicts.values()) <= {"same", "unjudged"}
            assert done.returncode == (0 if "same" in verdicts.values() else 2), done.stderr
            long = [answer for answer in told["answers"] if answer["tokens"] >= 32]
            assert {layer["source"] for answer in long for layer in answer["layers"]} >= {"k.0", "v.0"}
            if verdicts:
                one = verify("--request", sorted(verdicts, key=int)[-1])
                assert f"process {engine.pid}, replica 0, rank 0" in one.stdout
        done = verify("--all-parked", "--json")
        (told,) = json.loads(done.stdout)
        assert "error" not in told, told
        assert all(answer["parked"] for answer in told["answers"])
        ended = [answer["request"] for answer in told["answers"]]
        assert {answer["verdict"] for answer in told["answers"]} <= {"same", "gone", "unjudged"}
        one = verify("--prefix-of", ended[-1])
        assert f"prefix of {ended[-1]}: " in one.stdout
        assert one.returncode in (0, 2), one.stderr
        unknown = verify("--prefix-of", "nobody")
        assert unknown.returncode == 2
        assert "prefix of nobody: unjudged, 0 tokens (nothing is remembered" in unknown.stdout
        unknown = verify("--request", "nobody")
        assert unknown.returncode == 2
        assert "nobody: unjudged, 0 tokens (request 'nobody' is not running" in unknown.stdout
        assert engine.poll() is None
    finally:
        engine.communicate(timeout=120)
