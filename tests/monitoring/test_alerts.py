"""The alerts in a real Prometheus that scrapes guarded processes, which are broken, killed and started again.

The engine is the toy one, and the token counters of vLLM are counted by the test's own process: a stand-in for servers
that take minutes to start. Minutes of the rules are two seconds here."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

import canary_core

pytestmark = [
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus: apt-get install prometheus"),
    pytest.mark.timeout(600),
]

MONITORING = Path(__file__).parents[2] / "monitoring"

SERVE = """
import itertools, select, sys, time
import prometheus_client
tokens = [
    prometheus_client.Counter(f"vllm:{kind}_tokens", "As vLLM counts.", ["model_name", "engine"]).labels("toy", "0")
    for kind in ("prompt", "generation")
]
prometheus_client.start_http_server(int(sys.argv[1]), "127.0.0.1")
guarded = None
if sys.argv[2] == "guarded":
    from support.guarded import Guarded
    guarded = Guarded(read_check=-1)
told = set(sys.argv[3:])
for number in itertools.count():
    if guarded is None or "frozen" in told:
        tokens[1].inc(4)
        time.sleep(0.2)
    else:
        request = guarded.submit(f"r{number}", tokens=6)
        request.tokens[:] = [5 + (number * 7 + i) % 900 for i in range(6)]
        guarded.step()
        guarded.canary.witness.computed(6)
        tokens[0].inc(6)
        if "flip" in told:
            told.remove("flip")
            guarded.engine.v[1][request.slots[2], 3] += 1
        if "off" in told:
            told.remove("off")
            guarded.canary.fail("a test", RuntimeError("told to"))
        for token in range(4):
            request.tokens.append(905 + (number * 3 + token) % 90)
            guarded.step()
            guarded.canary.witness.computed(1)
            tokens[1].inc()
            time.sleep(0.05)
        guarded.engine.finish(request)
    if number == 0:
        print("ready", flush=True)
    while select.select([sys.stdin], [], [], 0)[0]:
        line = sys.stdin.readline()
        if not line:
            sys.exit()
        told.add(line.strip())
"""


class Process:
    """One that serves on a port of its own, from `start` to `kill`, again and again."""

    def __init__(self, guard: str = "guarded") -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.instance = f"127.0.0.1:{free.getsockname()[1]}"
        self.guard = guard

    def start(self, folder: Path, *told: str) -> None:
        """Returns once it serves."""
        paths = os.pathsep.join(map(str, [Path(__file__).parents[1], Path(canary_core.__file__).parents[1]]))
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("CANARY_", "PROMETHEUS_"))}
        environment |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CANARY_CONTROL": "off"}
        with folder.joinpath(f"{self.instance[-5:]}.log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVE, self.instance.rpartition(":")[2], self.guard, *told],
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def tell(self, word: str) -> None:
        """Breaks it."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """As the system does that has no memory left."""
        self.process.kill()
        self.process.communicate()


class Prometheus:
    """With Canary's rules, a minute of which is two seconds."""

    def __init__(self, folder: Path, targets: list[str]) -> None:
        rules = (MONITORING / "alerts.yml").read_text()
        folder.joinpath("alerts.yml").write_text(re.sub(r"\b(\d+)m\b", lambda m: f"{2 * int(m[1])}s", rules))
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": ["alerts.yml"],
            "scrape_configs": [{"job_name": "engines", "static_configs": [{"targets": targets}]}],
        }  # fmt: skip
        folder.joinpath("prometheus.yml").write_text(json.dumps(config))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.at = f"127.0.0.1:{free.getsockname()[1]}"
        self.process = subprocess.Popen(
            [
                "prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self.at}",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def query(self, expression: str) -> list[dict[str, str]]:
        """The labels of its samples, now."""
        query = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(f"http://{self.at}/api/v1/query?{query}", timeout=30) as answer:
                return [sample["metric"] for sample in json.load(answer)["data"]["result"]]
        except OSError:
            return []

    def firing(self) -> set[tuple[str, str]]:
        """Alert and instance of each that fires."""
        return {(a["alertname"], a["instance"]) for a in self.query('ALERTS{alertstate="firing"}')}

    def until(self, true: Callable[[set[tuple[str, str]]], bool], what: str, seconds: float = 120.0) -> float:
        """Waits until it is true of what fires; gives after how many seconds."""
        began = time.monotonic()
        while not true(firing := self.firing()):
            assert time.monotonic() - began < seconds, (what, firing)
            time.sleep(0.5)
        return time.monotonic() - began


def test_each_fires_for_what_was_broken_and_for_nothing_else(tmp_path):
    """Absent, off, standing still, an incident, killed -9, and the same incident in the process that was started again;
    processes that are well, or that were guarded well until then, are silent."""
    well, bare, frozen, off = Process(), Process("bare"), Process(), Process()
    all_of_them = (well, bare, frozen, off)
    for process in all_of_them:
        process.start(tmp_path)
    server = Prometheus(tmp_path, [process.instance for process in all_of_them])
    try:
        absent = ("KVCanaryAbsent", bare.instance)
        server.until(lambda firing: absent in firing, "absent")
        time.sleep(20)
        assert server.firing() == {absent}

        frozen.tell("frozen")
        off.tell("off")
        well.tell("flip")
        wanted = {
            absent, ("KVCanaryStandsStill", frozen.instance), ("KVCanaryOff", off.instance),
            ("KVCacheIncident", well.instance),
        }  # fmt: skip
        incident = ("KVCacheIncident", well.instance)
        server.until(lambda firing: incident in firing, "the first incident", 30)
        server.until(lambda firing: wanted - {incident} <= firing, "standing still and off")
        server.until(lambda firing: incident not in firing, "the first incident's end")
        assert server.firing() == wanted - {incident}

        # The next process has its incident before anybody looks: its counter stands where it stood.
        well.kill()
        gone = ("KVCanaryGone", well.instance)
        server.until(lambda firing: gone in firing, "killed")
        well.start(tmp_path, "flip")
        server.until(lambda firing: incident in firing, "the second incident", 30)
        server.until(lambda firing: gone not in firing, "answers again", 30)
        server.until(lambda firing: firing == wanted - {incident}, "its end")
    finally:
        server.process.terminate()
        server.process.wait(30)
        for process in all_of_them:
            process.kill()
