"""The alert rules and the dashboard in ``monitoring/`` fit the metrics, and promtool has no objection."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from canary_core.metrics.families import FAMILIES

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "monitoring"
NAMES = {family.full_name for family in FAMILIES}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus"
)


def named(text: str) -> set[str]:
    """Canary's metrics that a text names."""
    return set(re.findall(r"kv_canary_\w+", text))


@pytest.mark.parametrize("file", ["alerts.yml", "grafana.json"])
def test_only_metrics_that_exist_are_asked_for(file):
    """A name that was changed is changed here, too."""
    found = named((MONITORING / file).read_text())
    assert found
    assert found <= NAMES


def test_the_dashboard_shows_every_metric():
    """Each is in some panel."""
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    shown = {name for panel in dashboard["panels"] for target in panel["targets"] for name in named(target["expr"])}
    assert shown == NAMES


def test_panels_lie_beside_each_other():
    """Within Grafana's 24 columns, none over another, each with a number of its own."""
    panels = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    cells = [
        (x, y)
        for p in (panel["gridPos"] for panel in panels)
        for x in range(p["x"], p["x"] + p["w"])
        for y in range(p["y"], p["y"] + p["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_every_alert_has_a_page():
    """Its link leads to a heading of the runbook, and the runbook has no other alerts."""
    links = re.findall(r"runbook_url: docs/runbook.md#(\w+)", (MONITORING / "alerts.yml").read_text())
    alerts = re.findall(r"alert: (\w+)", (MONITORING / "alerts.yml").read_text())
    assert links == [alert.lower() for alert in alerts]
    headings = re.findall(r"^## (KV\w+)$", (ROOT / "docs" / "runbook.md").read_text(), re.M)
    assert headings == alerts


def test_every_metric_is_documented():
    """docs/metrics.md has each, with its labels, as the code has them."""
    rows = re.findall(r"^\| `(kv_canary_\w+)` \| (\w+) \|([^|]*)\|", (ROOT / "docs" / "metrics.md").read_text(), re.M)
    assert [(name, kind, re.findall(r"`(\w+)`", labels)) for name, kind, labels in rows] == [
        (family.full_name, family.kind, list(family.extra)) for family in FAMILIES
    ]


@needs_promtool
@pytest.mark.parametrize("arguments", [["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]])
def test_promtool_passes(arguments):
    """The rules are well formed, and fire when they should and only then."""
    done = subprocess.run(["promtool", *arguments], cwd=MONITORING, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_would_notice(tmp_path):
    """Rules that never fire, and rules that always do, fail the same tests."""
    rules = (MONITORING / "alerts.yml").read_text()
    tests = (MONITORING / "alerts_test.yml").read_text()
    for broken in (rules.replace("> 0", "> 100"), rules.replace("unless on", "or on"), rules.replace("== 0", "== 7")):
        assert broken != rules
        tmp_path.joinpath("alerts.yml").write_text(broken)
        tmp_path.joinpath("alerts_test.yml").write_text(tests)
        done = subprocess.run(
            ["promtool", "test", "rules", "alerts_test.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode != 0
