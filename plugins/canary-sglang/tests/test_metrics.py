"""SGLang's own ``/metrics``: its server has Canary's numbers too, written by the scheduler's process."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from engines import python_path
from engines.user_script import on_cpu

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.takes_turns("the core's tests/metrics, and canary-vllm's two ranks"),
]


def free_port() -> int:
    """One that nobody has just now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def get(url: str, body: object = None) -> str:
    """What the server answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(answer.read().decode())


def options(folder: Path, port: int) -> list[str]:
    """The server's command line, and its model."""
    config, wanted = on_cpu()
    folder.mkdir(parents=True)
    folder.joinpath("config.json").write_text(json.dumps(config))
    line = ["--model-path", str(folder), "--port", str(port), "--enable-metrics", "--skip-server-warmup"]
    for name, value in wanted.items():
        if value is not False:
            line += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return line


def generate(url: str, requests: int) -> None:
    """Some prompts that share a prefix, of a length that differs, so that the prefix cache has something to do."""
    for number in range(requests):
        tokens = [5 + i % 200 for i in range(10 + 5 * number)] + [7 + number] * 6
        sampling = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}
        get(f"{url}/generate", {"input_ids": tokens, "sampling_params": sampling})


def control(environment: dict[str, str], command: str) -> None:
    """``canary ctl`` for the server's processes."""
    line = [sys.executable, "-m", "canary_core", "ctl", command]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_engines_endpoint_has_canarys_metrics(tmp_path):
    """With ``--enable-metrics`` and nothing else set: forwards, slots and a finding, beside SGLang's own metrics. Two
    pauses in the middle of the traffic before it bring no false alarm."""
    port = free_port()
    ours = ("CANARY_", "TRITON_INTERPRET", "PROMETHEUS_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    environment |= {
        "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "CANARY_PLUGINS": "sglang", "CANARY_PROFILE": "hunt",
        "CANARY_FAULTS": "real_kv_used:warmup=250,source=v.1", "CANARY_CONTROL": "write",
        "CANARY_CONTROL_DIR": str(tmp_path / "control"),
    }  # fmt: skip
    log = tmp_path / "log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *options(tmp_path / "model", port)],
            stdout=out, stderr=out, env=environment, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(server, f"{url}/health", log)
        for command in ("pause", "resume", "pause", "resume"):
            generate(url, 4)
            control(environment, command)
        generate(url, 4)
        time.sleep(3)
        before = get(f"{url}/metrics")
        deadline = time.monotonic() + 120
        while not incidents(text := get(f"{url}/metrics")) and time.monotonic() < deadline:
            generate(url, 4)
    finally:
        server.terminate()
        server.wait(60)
    assert incidents(before) == []
    (paused,) = re.findall(r'^kv_canary_checks_skipped_total\{.*reason="paused".*\} (\S+)$', before, re.M)
    assert float(paused) > 40
    (found,) = incidents(text)
    assert 'kind="bytes"' in found[0]
    assert found[1] == "1.0"
    (forwards,) = re.findall(r"^kv_canary_checked_forwards_total\{.*\} (\S+)$", text, re.M)
    assert float(forwards) > 20
    assert re.search(r"^kv_canary_coverage_ratio\{.*\} 1\.0$", text, re.M)
    assert "sglang:prompt_tokens_total" in text


def wait_for(server: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    """Until the server answers."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            get(url)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    pytest.fail(f"the server did not start\n{log.read_text(errors='replace')[-3000:]}")


def incidents(text: str) -> list[tuple[str, str]]:
    """Labels and number of each kind and region of which there was an incident; each begins at 0."""
    found = re.findall(r"^kv_canary_incidents_total\{(.*)\} (\S+)$", text, re.M)
    return [(labels, number) for labels, number in found if float(number)]
