"""``canary ctl verify`` beside vLLM's engine core in a process of its own, as a user types it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import canary_core

pytestmark = [pytest.mark.timeout(600)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_running_requests_are_verified_from_another_process(ranks, tmp_path):
    """All that run, and one by name, each rank its shard; the name is that of the engine's core."""
    folder = tmp_path / "c"
    folder.mkdir(mode=0o700)
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests), str(Path(canary_core.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ, "CANARY_CONTROL_DIR": str(folder), "PYTHONPATH": path, "CANARY_PLUGINS": "vllm",
        "CANARY_CONTROL": "write", "CANARY_SCRUB_BUDGET": "0",
    }  # fmt: skip
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
        assert unknown.stdout.count("nobody: unjudged, 0 tokens (it has no KV in the cache just now)") == ranks
        assert "canary: there is no verdict on request 'nobody'; the reason stands beside it\n" in unknown.stderr
        assert engine.poll() is None
    finally:
        engine.communicate(timeout=200)
