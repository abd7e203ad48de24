"""An engine that should be guarded and is not has metrics that say so."""

import os
import subprocess
import sys
from pathlib import Path

import prometheus_client
import pytest
from support.guarded import Guarded

from canary_core.metrics import prometheus
from canary_core.metrics.readings import Readings

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
