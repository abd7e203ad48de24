"""Metrics, alerts and dashboard with a real Prometheus that scrapes a real guarded engine."""

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny.batching import HAS_POOL

ROOT = Path(__file__).parents[3]
MONITORING = ROOT / "monitoring"

pytestmark = [
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus: apt-get install prometheus"),
    pytest.mark.skipif(not HAS_POOL, reason="the traffic of this test needs Transformers 5.18"),
]

SERVE = '''
import itertools, select, sys, time
import torch
from tiny import models
from tiny.batching import Traffic

def flip(cache):
    """The lowest bits of the values in the first slot of a running request, once its prompt is long computed."""
    allocator = next(iter(cache.cache_allocators.values()))
    while not allocator.block_table:
        time.sleep(0.001)
    block = next(iter(list(allocator.block_table.values())))[0]
    time.sleep(0.05)
    values = allocator._kv_token_views[allocator.layer_indices[0]][1]
    words = values.view(torch.int32 if values.element_size() == 4 else torch.int16)
    words[block * allocator.block_physical_stride] ^= 1

model = models.batching("llama")
engine = model.init_continuous_batching(**Traffic(new_tokens=20).settings(model))
engine.start()
for seed in itertools.count(1):
    prompts = Traffic(seed=seed, requests=8).prompts()
    for prompt in prompts:
        engine.add_request(prompt, max_new_tokens=20)
    if seed > 6:
        flip(engine.batch_processor.cache)
    for _ in prompts:
        assert engine.get_result(timeout=60) is not None
    if seed == 1:
        print("ready", flush=True)
    if select.select([sys.stdin], [], [], 0)[0]:
        break
engine.stop(block=True)
'''


class Prometheus:
    """A server on a port of its own, with Canary's alert rules, a minute of which is two seconds."""

    def __init__(self, folder: Path, target: int) -> None:
        rules = (MONITORING / "alerts.yml").read_text()
        folder.joinpath("alerts.yml").write_text(re.sub(r"\b(\d+)m\b", lambda m: f"{2 * int(m[1])}s", rules))
        folder.joinpath("prometheus.yml").write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [alerts.yml]\n"
            f"scrape_configs: [{{job_name: engine, static_configs: [{{targets: ['127.0.0.1:{target}']}}]}}]\n"
        )
        self.url = f"http://127.0.0.1:{free_port()}"
        self.process = subprocess.Popen(
            [
                "prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self.url.removeprefix('http://')}",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def ask(self, path: str, **arguments: str) -> Any:
        """What its API answers."""
        query = urllib.parse.urlencode(arguments)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression, now."""
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def until(self, expression: str, seconds: float = 120.0) -> list[dict[str, Any]]:
        """Its samples, once there are any."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                found = self.query(expression)
            except OSError:
                found = []
            if found:
                return found
            time.sleep(0.5)
        pytest.fail(f"{expression} had no answer for {seconds} s")


def free_port() -> int:
    """One that nobody has just now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that scrapes a guarded engine in whose cache a bit flips after a while."""
    folder = tmp_path_factory.mktemp("monitoring")
    folder.joinpath("serve.py").write_text(SERVE)
    port = free_port()
    environment = {
        **os.environ,
        "CANARY_PLUGINS": "transformers",
        "CANARY_PROFILE": "hunt",
        "CANARY_METRICS_LISTEN": str(port),
        "CANARY_CONTROL_DIR": str(folder / "control"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    log = folder.joinpath("engine.log").open("w")
    engine = subprocess.Popen(
        [sys.executable, "-m", "canary_core", "run", str(folder / "serve.py")],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
    )  # fmt: skip
    server = Prometheus(folder, port)
    try:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "ready\n", folder.joinpath("engine.log").read_text()
        server.until("kv_canary_incidents_total > 0")
        yield server
    finally:
        server.process.terminate()
        server.process.wait(timeout=30)
        engine.communicate("end\n", timeout=120)
        log.close()


def test_an_incident_of_a_real_engine_fires_its_alert(scraped):
    """The flipped bits, by kind and region; no other alert but that."""
    (sample,) = scraped.query("kv_canary_incidents_total > 0")
    assert (sample["metric"]["kind"], sample["metric"]["rank"]) == ("bytes", "0")
    (alert,) = scraped.until('ALERTS{alertname="KVCacheIncident", alertstate="firing"}')
    assert (alert["metric"]["kind"], alert["metric"]["severity"]) == ("bytes", "critical")
    others = {a["metric"]["alertname"] for a in scraped.query('ALERTS{alertstate="firing"}')} - {"KVCacheIncident"}
    # The engine builds its cache anew for each call, with what a scrub of a fresh pool takes on a CPU.
    assert others <= {"KVCanaryExpensive", "KVCanarySlow"}


def test_every_query_of_the_dashboard_answers(scraped):
    """With the variables that Grafana puts in; annotations may have nothing to say."""
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    queries = [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 20
    # Nothing leaves this engine's cache and comes back.
    queries = [(title, expression) for title, expression in queries if "ledger" not in expression]
    silent = []
    for title, expression in queries:
        real = (
            expression.replace("$instance", ".*")
            .replace("$rank", ".*")
            .replace("$replica", ".*")
            .replace("$__rate_interval", "20s")
        )
        deadline = time.monotonic() + 60
        while not scraped.query(real) and time.monotonic() < deadline:
            time.sleep(0.5)
        if not scraped.query(real):
            silent.append((title, real))
    assert silent == []


@pytest.mark.parametrize("panel", ["Incidents", "Findings"])
def test_the_first_incident_is_seen_on_the_dashboard(panel, scraped):
    """Its counter begins at 1, which Prometheus' `increase` takes for no increase at all."""
    panels = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    ((target,),) = [p["targets"] for p in panels if p["title"] == panel]
    real = (
        target["expr"]
        .replace("$instance", ".*")
        .replace("$rank", ".*")
        .replace("$replica", ".*")
        .replace("$__rate_interval", "20s")
    )
    (highest,) = scraped.until(f"max_over_time(({real})[10m:1s]) > 0")
    assert highest["metric"]["kind"] == "bytes"


def test_no_label_names_a_request_or_a_slot(scraped):
    """Labels are few, and so are the values of each, whatever was served."""
    for name in scraped.ask("label/__name__/values"):
        if name.startswith("kv_canary_"):
            for series in scraped.ask("series", **{"match[]": name}):
                assert series.keys() <= {
                    "__name__", "instance", "job", "replica", "rank", "model", "kind", "region", "reason", "part",
                    "mode", "host", "gpu", "pci", "version", "profile", "layers",
                }  # fmt: skip
    assert len(scraped.query('{__name__=~"kv_canary_.*"}')) < 150
