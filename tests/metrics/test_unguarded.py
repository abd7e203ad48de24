"""An engine that should be guarded and is not has metrics that say so."""

import os
import subprocess
import sys
from pathlib import Path

import prometheus_client
import pytest
from support.guarded import Guarded

from canary_core import CanaryConfig, Uncovered, attach, hook_manager, report_unguarded
from canary_desk.metrics import plugin, prometheus
from canary_desk.metrics.readings import Readings

ROOT = Path(__file__).parents[2]

REFUSED = """
import prometheus_client, torch
from canary_core import AttachError, CanaryConfig, attach, hook_manager

def build():
    raise AttachError("a pool like none before")

config = CanaryConfig.load()
hook_manager().hook.canary_configure(config=config, manager=hook_manager())
attach("attach to engine", config, build)
print(prometheus_client.generate_latest().decode())
"""

MISSPELT = """
import prometheus_client
from canary_core import CanaryError, start_plugins
try:
    start_plugins()
except CanaryError:
    pass
print(prometheus_client.generate_latest().decode())
"""


@pytest.mark.parametrize(("program", "plugins"), [(REFUSED, ""), (MISSPELT, "no-such-plugin")], ids=["attach", "start"])
def test_the_metrics_are_there_and_say_that_nothing_is_checked(program, plugins):
    """Where they would be if all were well: `kv_canary_enabled` is 0, and `kv_canary_info` says whose it is. Of what
    was never checked there is no figure that could be taken for a good one."""
    environment = {**os.environ, "CANARY_PLUGINS": plugins, "CANARY_REPLICA": "2", "CANARY_CONTROL": "off"}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert 'kv_canary_enabled{mode="log",model="",rank="0",replica="2"} 0.0' in run.stdout
    assert "kv_canary_info{" in run.stdout
    assert "\nkv_canary_coverage_ratio{" not in run.stdout
    assert "\nkv_canary_guarded_ratio{" not in run.stdout


PATIENT = """
import os, struct, sys, time
from canary_core import CanaryError, start_plugins
try:
    start_plugins()
except CanaryError:
    pass
assert "prometheus_client" not in sys.modules
os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[1]
import prometheus_client
from prometheus_client import values
assert values.ValueClass is not values.MutexValue
from prometheus_client import multiprocess
until = time.monotonic() + 60
text = ""
while "kv_canary_enabled{" not in text and time.monotonic() < until:
    time.sleep(0.5)
    registry = prometheus_client.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    try:
        text = prometheus_client.generate_latest(registry).decode()
    except struct.error:  # a file that is just being made
        continue
print(text)
"""


def test_an_engine_may_say_late_that_its_processes_share_their_metrics(tmp_path):
    """A start that fails before the engine has set that up, with a port asked for: prometheus_client is not imported
    ahead of the engine, whose own metrics would be none of the shared ones then."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("PROMETHEUS_")}
    environment = {**bare, "CANARY_PLUGINS": "no-such-plugin", "CANARY_METRICS_LISTEN": "127.0.0.1:29464"}
    run = subprocess.run(
        [sys.executable, "-c", PATIENT, str(tmp_path)], env=environment, cwd=ROOT, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert 'kv_canary_enabled{mode="log",model="",rank="0",replica="0"} 0.0' in run.stdout


@pytest.fixture
def numbers(monkeypatch):
    """Readings of this test alone, to which the plugin gives; nothing is offered anywhere."""
    readings = Readings()
    monkeypatch.setattr(plugin, "READINGS", readings)
    monkeypatch.setattr(plugin.OFFERS, "begin", lambda config, tell: None)
    return lambda: {reading.owner: reading.enabled for reading in readings.take()[0]}


def test_a_refused_pool_is_the_replicas_and_ranks_that_has_it(numbers):
    """Whether attaching raised or the plugin gave a reason: by what it has found out of its process."""
    config = CanaryConfig.load(replica=2, rank=1, served_model="llama")
    hook_manager().hook.canary_configure(config=CanaryConfig.load(), manager=hook_manager())
    attach("attach to toy", config, lambda: report_unguarded([Uncovered("pool", 5, "FP4 pages")], "draft"))
    assert numbers() == {}
    attach("attach to toy", config, lambda: report_unguarded([Uncovered("pool", 5, "FP4 pages")]))
    assert numbers() == {("2", "1", "llama"): False}
    attach("attach to toy", config.model_copy(update={"rank": 0}), lambda: 1 / 0)
    assert numbers() == {("2", "1", "llama"): False, ("2", "0", "llama"): False}


def test_a_bad_setting_leaves_the_others_readable(monkeypatch):
    """Where Canary can't start for its sake, the metrics are still where they were asked for."""
    monkeypatch.setenv("CANARY_MODE", "loud")
    monkeypatch.setenv("CANARY_RING_ROWS", "0")
    monkeypatch.setenv("CANARY_METRICS_LISTEN", "9464")
    monkeypatch.setenv("CANARY_REPLICA", "3")
    config = CanaryConfig.readable()
    assert (config.mode, config.ring_rows, str(config.metrics_listen), config.replica) == ("log", 1024, "9464", 3)


def test_what_is_guarded_in_the_end_is_told_as_that():
    """A pool of the same replica, rank and model that can be guarded takes the place of one that could not."""
    readings, guarded = Readings(), Guarded(replica=1)
    readings.refuse(guarded.canary.place, guarded.canary.config)
    (refused,), _ = readings.take()
    assert not refused.enabled
    readings.add(guarded.canary)
    (reading,), _ = readings.take()
    assert reading.enabled


def test_each_kind_of_finding_begins_at_zero():
    """So that the first one after a restart is one more than before."""
    readings, guarded = Readings(), Guarded()
    readings.add(guarded.canary)
    registry = prometheus_client.CollectorRegistry()
    prometheus.register(readings, registry)
    text = prometheus_client.generate_latest(registry).decode()
    for family in ("violations", "incidents"):
        labels = 'kind="bytes",model="",rank="0",region="full",replica="0"'
        assert f"kv_canary_{family}_total{{{labels}}} 0.0" in text
