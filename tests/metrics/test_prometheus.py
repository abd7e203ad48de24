"""Metrics as Prometheus sees them: in a registry, on a port, and in the files that processes share."""

import gc
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.guarded import Guarded

import canary_core
from canary_core.config import CanaryConfig
from canary_core.errors import MetricsError
from canary_desk.metrics import prometheus
from canary_desk.metrics.families import FAMILIES, OWNER
from canary_desk.metrics.plugin import Offers
from canary_desk.metrics.readings import Readings

ROOT = Path(__file__).parents[2]


@pytest.fixture
def readings() -> Readings:
    """Those of one test."""
    return Readings()


def scraped(registry: prometheus_client.CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """All samples of Canary's metrics as a scraper reads them: name and labels to value."""
    text = prometheus_client.generate_latest(registry).decode()
    return {
        (sample.name.removeprefix("kv_canary_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("kv_canary_")
    }


def labels(**extra: str) -> tuple[tuple[str, str], ...]:
    """As `scraped` has them."""
    return tuple(sorted({"replica": "0", "rank": "0", "model": "", **extra}.items()))


def broken_engine(**settings: object) -> Guarded:
    """An engine one of whose slots was changed, and found to be."""
    guarded = Guarded(read_check=-1, **settings)
    request = guarded.submit(tokens=6)
    guarded.step()
    guarded.engine.v[1][request.slots[2], 3] += 1
    guarded.decode()
    return guarded


def test_a_scrape_has_what_the_host_knows(readings):
    """Counters, gauges and the finding, without a request or a slot in any label."""
    registry = prometheus_client.CollectorRegistry()
    prometheus.register(readings, registry)
    guarded = broken_engine()
    readings.add(guarded.canary)
    found = scraped(registry)
    stats = guarded.canary.stats()
    assert found["violations_total", labels(kind="bytes", region="full")] == 1
    assert found["incidents_total", labels(kind="bytes", region="full")] == 1
    assert found["forwards_total", labels()] == found["checked_forwards_total", labels()] == 2
    assert found["slots_checked_total", labels()] == stats["checked_slots"] > 0
    assert found["bytes_checked_total", labels()] == stats["checked_bytes"] > 0
    assert found["coverage_ratio", labels()] == 1
    assert found["enabled", labels(mode="log")] == 1
    assert found["paused", labels()] == 0
    assert 0 <= time.time() - found["last_check_timestamp_seconds", labels()] < 60
    assert found["live_bytes_detection_seconds", labels()] == pytest.approx(guarded.canary.detection_s)
    known = {*OWNER, *(name for family in FAMILIES for name in family.extra)}
    assert {name for _, pairs in found for name, _ in pairs} <= known


@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
def test_counters_never_go_down(close, readings):
    """What a Canary that has ended came to stays in its counters; its gauges are gone."""
    registry = prometheus_client.CollectorRegistry()
    prometheus.register(readings, registry)
    # What looks into an incident keeps its Canary until that is closed.
    guarded = broken_engine() if close else Guarded()
    guarded.submit()
    guarded.step()
    readings.add(guarded.canary)
    before = scraped(registry)
    assert before["forwards_total", labels()] > 0
    if close:
        readings.end(guarded.canary)
    del guarded
    gc.collect()
    after = scraped(registry)
    assert {k: v for k, v in before.items() if k[0].endswith("_total")} == after


def test_a_pause_and_an_error_of_ours_are_seen(readings):
    """``enabled`` is 0 in both, and ``paused`` tells them apart."""
    registry = prometheus_client.CollectorRegistry()
    prometheus.register(readings, registry)
    guarded = Guarded()
    readings.add(guarded.canary)
    guarded.canary.step.pause()
    found = scraped(registry)
    assert (found["enabled", labels(mode="log")], found["paused", labels()]) == (0, 1)
    guarded.canary.step.resume()
    guarded.canary.fail("test", RuntimeError("broken"))
    found = scraped(registry)
    assert (found["enabled", labels(mode="log")], found["paused", labels()]) == (0, 0)


def test_a_registry_that_has_our_names_is_left_alone(readings):
    """One sentence; what was there is scraped as before."""
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.Gauge("kv_canary_paused", "Somebody else's.", registry=registry).set(7)
    with pytest.raises(MetricsError, match=r"names already .*kv_canary_paused.*CANARY_METRICS_LISTEN"):
        prometheus.register(readings, registry)
    assert scraped(registry) == {("paused", ()): 7}


def test_a_collector_never_breaks_a_scrape(readings, monkeypatch):
    """Where what it reads can't be read, the engine's own metrics are scraped all the same."""
    registry = prometheus_client.CollectorRegistry()
    prometheus.register(readings, registry)
    prometheus_client.Gauge("engine_load", "The engine's.", registry=registry).set(3)
    monkeypatch.setattr(readings, "take", lambda: 1 / 0)
    assert b"engine_load 3.0" in prometheus_client.generate_latest(registry)


def test_a_port_of_its_own(readings):
    """CANARY_METRICS_LISTEN is served at /metrics; rank r takes the r-th port after it."""
    guarded = broken_engine()
    readings.add(guarded.canary)
    port = _free_port()
    told = []
    Offers(readings).begin(CanaryConfig.load(metrics_listen=f"127.0.0.1:{port - 3}", rank=3), told.append)
    place = f"http://127.0.0.1:{port}/metrics"
    assert place in [event.fields["place"] for event in told]
    text = urllib.request.urlopen(place, timeout=10).read().decode()
    assert 'kv_canary_violations_total{kind="bytes",model="",rank="0",region="full",replica="0"} 1.0' in text


def test_a_port_in_use_is_passed_over(readings):
    """As by the same rank of another replica on this machine: the next free one is taken, and told."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port, told = taken.getsockname()[1], []
        Offers(readings).begin(CanaryConfig.load(metrics_listen=str(port), replica=1), told.append)
    (event,) = (e for e in told if e.fields["place"].startswith("http"))
    assert event.name == "metrics"
    near = int(event.fields["place"].removeprefix("http://127.0.0.1:").removesuffix("/metrics"))
    assert port < near < port + prometheus.PORTS
    assert f"127.0.0.1:{port}/metrics was taken" in event.fields["reason"]
    assert "kv_canary_info" in urllib.request.urlopen(event.fields["place"], timeout=10).read().decode()


def test_where_no_port_is_free_it_is_one_sentence(readings, monkeypatch):
    """The engine goes on; nothing is tried a second time."""
    monkeypatch.setattr(prometheus, "PORTS", 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        offers, told = Offers(readings), []
        config = CanaryConfig.load(metrics_listen=str(port))
        for _ in range(2):
            offers.begin(config, told.append)
    (event,) = (e for e in told if e.fields["place"].startswith("http"))
    assert event.name == "metrics_unavailable"
    assert event.level == "warning"
    assert f"127.0.0.1:{port}" in event.fields["reason"]
    assert "CANARY_METRICS_LISTEN" in event.fields["reason"]


def test_off_is_off(readings):
    """Nothing is opened, and nothing is told."""
    told = []
    Offers(readings).begin(CanaryConfig.load(metrics="off", metrics_listen="1"), told.append)
    assert told == []


ENGINE = """
import sys, time
from support.guarded import Guarded
guarded = Guarded(read_check=-1, rank=int(sys.argv[1]), control="off")
request = guarded.submit(tokens=6)
guarded.step()
guarded.engine.v[1][request.slots[2], 3] += 1
guarded.decode()
print([e.fields["place"] for e in guarded.findings.told("metrics")], flush=True)
sys.stdin.read()
"""

ENDPOINT = """
import prometheus_client
from prometheus_client import multiprocess
registry = prometheus_client.CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(prometheus_client.generate_latest(registry).decode())
"""


def test_processes_share_one_endpoint(tmp_path):
    """As SGLang and vLLM do: each process writes files, and whoever is scraped puts them together. Two ranks are two
    labels, and what they wrote stays when they have ended."""
    paths = os.pathsep.join(map(str, [ROOT / "tests", Path(canary_core.__file__).parents[1]]))
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": paths}
    engines = [
        subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(rank)],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for engine in engines:
            assert engine.stdout is not None
            assert engine.stdout.readline() == "['shared files']\n"
    finally:
        for engine in engines:
            engine.communicate(timeout=60)
    text = subprocess.run(
        [sys.executable, "-c", ENDPOINT], env=environment, capture_output=True, text=True, check=True
    ).stdout
    for rank in "01":
        assert (
            f'kv_canary_violations_total{{kind="bytes",model="",rank="{rank}",region="full",replica="0"}} 1.0' in text
        )
        assert f'kv_canary_checked_forwards_total{{model="",rank="{rank}",replica="0"}} 2.0' in text
        assert f'kv_canary_coverage_ratio{{model="",rank="{rank}",replica="0"}} 1.0' in text


def test_a_folder_that_can_not_be_written_is_one_sentence(tmp_path):
    """The engine goes on without our metrics."""
    file = tmp_path / "file"
    file.write_text("")
    paths = os.pathsep.join(map(str, [ROOT / "tests", Path(canary_core.__file__).parents[1]]))
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(file), "PYTHONPATH": paths}
    script = (
        "from support.guarded import Guarded\n"
        "guarded = Guarded(control='off')\nguarded.submit()\nguarded.step()\n"
        "(event,) = guarded.findings.told('metrics_unavailable')\nprint(event.fields['reason'])\n"
        "assert guarded.canary.enabled"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "PROMETHEUS_MULTIPROC_DIR names one that can be written" in done.stdout


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
