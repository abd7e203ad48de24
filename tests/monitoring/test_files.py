"""The alert rules and the dashboard in ``monitoring/`` fit the metrics, and promtool has no objection."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from canary_desk.metrics.families import FAMILIES

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


def test_the_rules_test_of_incidents_by_gpu_is_that_of_the_dashboard():
    """promtool has evaluated the panel's query, but for what is chosen above the panels."""
    (tested,) = re.findall(r"expr: (sum by \(host, gpu, kind\).*)", (MONITORING / "alerts_test.yml").read_text())
    panels = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    (query,) = [panel["targets"][0]["expr"] for panel in panels if panel["title"] == "Incidents by GPU"]
    assert re.sub(r"\{[^}]*\}", "", query) == tested


def test_a_host_and_a_gpu_choose_what_is_shown():
    """The other choices are those of their processes, so "All" is no pattern that matches everything."""
    choices = {v["name"]: v for v in json.loads((MONITORING / "grafana.json").read_text())["templating"]["list"]}
    assert list(choices) == ["datasource", "host", "gpu", "instance", "replica", "rank"]
    for name in ("instance", "replica", "rank"):
        assert 'kv_canary_info{host=~"$host", gpu=~"$gpu"' in choices[name]["query"]["query"]
        assert "allValue" not in choices[name]


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
    """Its link is a URL that leads to a heading of the runbook, which has no others; docs/metrics.md lists them."""
    rules = (MONITORING / "alerts.yml").read_text()
    links = re.findall(r"runbook_url: (\S+)", rules)
    alerts = re.findall(r"alert: (\w+)", rules)
    assert links == [f"https://canary.example/docs/runbook.md#{alert.lower()}" for alert in alerts]
    headings = re.findall(r"^## (KV\w+)$", (ROOT / "docs" / "runbook.md").read_text(), re.M)
    assert headings == alerts
    listed = re.findall(r"^\| \[`(KV\w+)`\]\(runbook\.md#(\w+)\)", (ROOT / "docs" / "metrics.md").read_text(), re.M)
    assert listed == [(alert, alert.lower()) for alert in alerts]


def test_the_links_can_be_led_elsewhere():
    """By the command in the rules' first lines: not one is left that leads to the placeholder."""
    rules = (MONITORING / "alerts.yml").read_text()
    (command,) = re.findall(r"^#     sed -i '(s\|.*\|)' alerts.yml$", rules, re.M)
    done = subprocess.run(["sed", command], input=rules, capture_output=True, text=True, check=True)
    links = re.findall(r"runbook_url: (\S+)", done.stdout)
    assert links
    assert all(link.startswith("https://wiki.my.org/canary/runbook.md#") for link in links)


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


def mutants() -> dict[str, tuple[str, str]]:
    """What is taken out of the rules, one at a time, and what stands there instead: a condition, or all of an alert."""
    rules = (MONITORING / "alerts.yml").read_text()
    found = {}
    own = "on (instance, replica, rank, model)"
    for alert in re.findall(r"- alert: (\w+)", rules):
        (block,) = re.findall(rf"      - alert: {alert}\n        expr: >-\n(.*?)\n        (?:for|labels):", rules, re.S)
        found[f"{alert} never fires"] = (block, "          absent(up) > 7")
    return found | {
        "after a restart": (f"and {own} resets(kv_canary_forwards_total[15m]) > 0", "< 0"),
        "from the first one on": ("unless kv_canary_incidents_total offset 15m", "< 0"),
        "a counter's increase": ("increase(kv_canary_incidents_total[15m]) > 0", "kv_canary_incidents_total > 100"),
        "paused is not stalled": ("(kv_canary_paused == 1 or kv_canary_enabled == 0)", "kv_canary_paused == 7"),
        "no forward, but tokens": (" or rate(kv_canary_computed_tokens_total[5m]) > 0", ""),
        "by replica": (f"{own} rate", "on (instance, rank, model) rate"),
        "the engine's own counters": ("(kv_canary:engine_tokens:group > 0 or ", "("),
        "ranks of one replica": (" or kv_canary:checked_forwards:group > 0)", ")"),
        "of one replica, not of another": ("and on (guard_group, replica)\n", "and on (guard_group)\n"),
        "a draft model may idle": ("max by (guard_group, instance, replica, rank) (\n", "(\n"),
        "groups": ('"guard_group", ";", "guard_group", "instance"', '"guard_group", ";", "no_label", "instance"'),
        "what is not expected": ('{canary!="off"}', ""),
        "underlines for colons": ("vllm_generation_tokens_total", "no_such_metric"),
        "one engine of a host": ("unless on (instance) kv_canary:engine_tokens:group", ""),
        "Canary on a port of its own": ("unless on (host)", "unless on (instance)"),
        "vLLM's replicas": ('"engine", "(.+)"', '"no_label", "(.+)"'),
        "SGLang's replicas": ('"dp_rank", "(.+)"', '"no_label", "(.+)"'),
        "SGLang without replicas": ('"replica", "0", "replica", ""', '"replica", "7", "replica", ""'),
        "who was guarded": ("and on (job, instance) count", "or on (job, instance) count"),
        "a forward in flight": ("delta(kv_canary_missing_tokens[10m]) > 100\n          and ", ""),
        "a pause that has ended": (f"unless {own} increase", "unless on (rank, no_label) increase"),
        "the age of the alarm's test": ("timestamp_seconds > 600", "timestamp_seconds > 60000"),
        "an idle engine's alarm": (f"and {own} increase(kv_canary_forwards_total[10m]) > 1000", ""),
    }  # fmt: skip


@needs_promtool
@pytest.mark.parametrize("name", mutants())
def test_promtool_would_notice(name, tmp_path):
    """Rules without one of their conditions fail the same tests."""
    rules = (MONITORING / "alerts.yml").read_text()
    old, new = mutants()[name]
    assert old in rules
    tmp_path.joinpath("alerts.yml").write_text(rules.replace(old, new))
    shutil.copy(MONITORING / "alerts_test.yml", tmp_path)
    done = subprocess.run(
        ["promtool", "test", "rules", "alerts_test.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "FAILED" in done.stdout + done.stderr
