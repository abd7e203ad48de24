"""The ``coverage`` event, and ``canary coverage``, which reads it from a log."""

import json
from io import StringIO

import pytest
import structlog
import torch
from typer.testing import CliRunner

from canary_adapters import JoinedPools, LayerTensors, PackedPage, PackedPool, RowPool, addresses, kv_layers
from canary_core.config import CanaryConfig
from canary_core.events import Event
from canary_core.guard.canary import Canary
from canary_core.guard.coverage import Coverage
from canary_core.plugins import Plugins
from canary_core.region import Uncovered
from canary_desk import log
from canary_desk.cli import app


def _pool(name="full", layers=2):
    return RowPool(name, kv_layers(*([torch.zeros(9, 2, 4) for _ in range(layers)] for _ in "kv")))


def test_every_region_is_told_with_its_bytes_and_what_it_is_made_of():
    """Kind, bytes, slots and how many layers each half has; nothing is left out, so it is no warning."""
    event = Coverage(_pool().regions(), ()).event()
    assert (event.name, event.level) == ("coverage", "info")
    assert event.fields["coverage_ratio"] == 1
    assert event.fields["guarded_bytes"] == 9 * 32 * 4
    assert event.fields["regions"] == {
        "full": {"kind": "full", "bytes": 9 * 32 * 4, "slots": 9, "sources": {"k": 2, "v": 2}}
    }
    assert event.fields["summary"] == "100 % of 1.2 kB guarded"


def test_what_is_left_out_is_summed_up_by_part_and_reason():
    """One line tells the share, and each part with its size and why; 100 % only where nothing is missing."""
    left_out = [Uncovered("mamba/ring.0", 1, "rings"), Uncovered("mamba/ring.1", 1, "rings")]
    event = Coverage(_pool().regions(), left_out).event()
    assert event.level == "warning"
    assert event.fields["summary"] == "99.8 % of 1.2 kB guarded; left out: mamba 2 bytes (rings)"
    assert event.fields["uncovered"] == [
        {"name": "mamba/ring.0", "bytes": 1, "reason": "rings"},
        {"name": "mamba/ring.1", "bytes": 1, "reason": "rings"},
    ]


def test_nothing_guarded_is_a_warning():
    """A pool that is refused: no share at all."""
    event = Coverage((), [Uncovered("pool", 5, "unknown")]).event()
    assert (event.level, event.fields["coverage_ratio"]) == ("warning", 0.0)


def test_pairs_that_could_not_be_decided_are_told(monkeypatch, logs):
    """An adapter that ran out of steps says so at start-up."""
    monkeypatch.setattr(addresses, "TOTAL_STEPS", 0)
    both = torch.zeros(64, 4)
    pool = JoinedPools([RowPool("a", kv_layers([both[:, :2]], [both[:, 2:]]))])
    Canary(pool.regions(), CanaryConfig.load(), uncovered=pool.uncovered())
    event = next(e for e in logs if e["event"] == "coverage")
    assert event["log_level"] == "warning"
    assert [(item["name"], item["bytes"]) for item in event["uncovered"]] == [("a/k.0 ~ a/v.0", 0)]
    assert event["coverage_ratio"] == 1


COVERED = Coverage(_pool().regions(), ()).event()
DISABLED = Event("disabled", "error", {"where": "attach", "error": "KeyError('k')"})


@pytest.mark.parametrize(
    ("events", "sentence"),
    [
        ([DISABLED], "Canary was disabled, so nothing is guarded since then: KeyError('k') (in attach)"),
        ([COVERED, DISABLED], "Canary was disabled, so nothing is guarded since then: KeyError('k') (in attach)"),
        ([DISABLED, COVERED], None),
        ([COVERED, Event("disabled", "error", {**DISABLED.fields, "rank": 1})], "Canary of rank 1 was disabled"),
        (
            [Event("start_failed", "error", {"error": "CANARY_MODE: bad"})],
            "Canary did not start, so nothing is guarded",
        ),
        ([Event("plugins_loaded", "error", {"loaded": [], "failed": {"x": "no x"}})], "a plugin failed, so nothing is"),
        ([Event("plugins_loaded", "info", {"loaded": ["x"], "failed": {}})], "Canary was off (CANARY_MODE=off), so"),
        ([Event("stats")], "it has events of Canary, but no coverage event; give the log from the engine's start on"),
        ([], "it has no event of Canary, so it is no log of a guarded engine; start the engine with CANARY_PLUGINS"),
    ],
    ids=["disabled", "later", "restarted", "rank", "start", "plugin", "off", "late log", "foreign"],
)
@pytest.mark.parametrize("as_json", [False, True], ids=["table", "json"])
def test_a_log_that_says_nothing_good_is_told_why(events, sentence, as_json, monkeypatch, tmp_path):
    """Where nothing is guarded, or that is not known, the reason is one sentence on stderr and the exit code is 1."""
    log = tmp_path / "server.log"
    log.write_bytes(b"\xff\xfe noise\n" + _logged(monkeypatch, *events).encode())
    result = CliRunner().invoke(app.app, ["coverage", str(log), *(["--json"] if as_json else [])])
    if sentence is None:
        assert (result.exit_code, result.stderr) == (0, "")
        return
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"canary: {log}: {sentence}")
    if as_json:
        assert len(json.loads(result.stdout)) == events.count(COVERED)


def test_a_log_for_people_is_told_apart(tmp_path):
    """Events written as text are recognised, with colours too; and what to set instead is told."""
    log = tmp_path / "server.log"
    for name in ("canary", "\x1b[0m\x1b[1m\x1b[34mcanary\x1b[0m"):
        log.write_text(f"2026-01-01 [info     ] coverage      [{name}] summary='100 %'\n")
        result = CliRunner().invoke(app.app, ["coverage", str(log)])
        assert result.exit_code == 1
        assert "its events of Canary are text" in result.stderr


def test_anothers_coverage_event_is_not_ours(tmp_path):
    """A foreign event of that name is passed over."""
    log = tmp_path / "server.log"
    log.write_text('{"event": "coverage", "percent": 80}\n["event"]\n{"event"\n')
    result = CliRunner().invoke(app.app, ["coverage", str(log)])
    assert result.exit_code == 1
    assert "it has no event of Canary" in result.stderr


def _logged(monkeypatch, *events):
    """What reporting writes for ``events`` as JSON lines, among lines of others."""
    stream = StringIO()
    monkeypatch.setattr(log.sys, "stderr", stream)
    plugins = Plugins()
    plugins.load(CanaryConfig.load(log_format="json"))
    for event in events:
        plugins.emit(event)
    structlog.reset_defaults()
    return "loading weights {0.1 s}\n" + "".join(f"[rank 0] {line}\n" for line in stream.getvalue().splitlines())


def test_the_command_reads_what_was_logged(monkeypatch, tmp_path):
    """`canary coverage` finds the event in a log of JSON lines with others' lines in between, the last one of each
    model; a log that has none is exit code 1."""
    log = tmp_path / "server.log"
    events = [Coverage(_pool().regions(), [Uncovered("x", n, "unknown")]).event() for n in (1, 2)]
    log.write_text(_logged(monkeypatch, *events))
    result = CliRunner().invoke(app.app, ["coverage", str(log), "--json"])
    assert result.exit_code == 0
    (told,) = json.loads(result.stdout)
    assert told["uncovered"] == [{"name": "x", "bytes": 2, "reason": "unknown"}]
    assert told["regions"]["full"]["sources"] == {"k": 2, "v": 2}

    table = CliRunner().invoke(app.app, ["coverage", "-"], input=log.read_text())
    assert table.exit_code == 0
    for cell in ("full", "99.8 %", "unknown"):
        assert cell in table.stdout
    log.write_text("nothing of ours\n")
    assert CliRunner().invoke(app.app, ["coverage", str(log)]).exit_code == 1


def _engine(layers=2):
    """A pool by the engine's names, and its layers."""
    names = {f"{half}_buffer[{i}]": torch.zeros(9, 2, 4) for i in range(layers) for half in "kv"}
    return names, [LayerTensors(i, {h: names[f"{h}_buffer[{i}]"] for h in "kv"}) for i in range(layers)]


def _of_engine(tensors, *pools):
    regions = [region for pool in pools for region in pool.regions()]
    return Coverage.of_engine(regions, [item for pool in pools for item in pool.uncovered()], tensors)


def test_the_engines_own_tensors_are_the_denominator():
    """What no region describes is left out, under the engine's name for it."""
    tensors, layers = _engine()
    event = _of_engine(tensors, RowPool("full", layers)).event()
    assert (event.level, event.fields["denominator"], event.fields["coverage_ratio"]) == ("info", "engine", 1)
    event = _of_engine(tensors, RowPool("full", layers[:1])).event()
    assert (event.level, event.fields["coverage_ratio"]) == ("warning", 0.5)
    assert event.fields["uncovered"] == [
        {"name": f"{half}_buffer[1]", "bytes": 9 * 32, "reason": "nobody describes them"} for half in "kv"
    ]
    assert "left out: k_buffer[1] 288 bytes (nobody describes them), v_buffer[1] 288 bytes" in event.fields["summary"]


def test_names_that_differ_in_a_number_are_told_together():
    """Thirty layers fill no screen."""
    tensors, layers = _engine(30)
    summary = _of_engine(tensors, RowPool("full", layers[:2])).summary
    assert summary.endswith(
        "left out: k_buffer[*] 8.1 kB (nobody describes them), v_buffer[*] 8.1 kB (nobody describes them)"
    )


def test_without_the_engines_tensors_the_adapter_says_what_there_is():
    """The event says so."""
    assert Coverage(_pool().regions(), ()).event().fields["denominator"] == "adapter"


def test_bytes_that_several_regions_share_count_once():
    """Groups that take turns on the same memory."""
    tensors, layers = _engine()
    coverage = _of_engine(tensors, RowPool("a", layers), RowPool("b", layers))
    assert (coverage.guarded_bytes, coverage.ratio) == (4 * 288, 1)


def test_half_of_the_heads_is_half_of_the_bytes():
    """Gaps within a tensor."""
    tensors, layers = _engine()
    layers[1] = LayerTensors(1, {"k": tensors["k_buffer[1]"][:, :1], "v": tensors["v_buffer[1]"]})
    coverage = _of_engine(tensors, RowPool("full", layers))
    assert [(u.name, u.size_bytes) for u in coverage.uncovered] == [("k_buffer[1]", 144)]


def test_what_the_adapter_leaves_out_is_not_told_twice():
    """With an address or by its size alone; only the rest is nobody's."""
    tensors, layers = _engine()
    spare = RowPool("full", layers, slots=8)
    coverage = _of_engine(tensors, spare)
    assert {u.reason for u in coverage.uncovered} == {"1 rows beyond the pool's slots"}
    assert coverage.ratio == 8 / 9
    tensors["extra"], tensors["more"] = torch.zeros(25), torch.zeros(5)
    coverage = Coverage.of_engine(RowPool("full", layers).regions(), [Uncovered("x", 100, "x")], tensors)
    assert [(u.name, u.size_bytes) for u in coverage.uncovered] == [("x", 100), ("more", 20)]


def test_padding_of_packed_pages_has_an_address():
    """So the engine's bytes come out even."""
    pages = torch.zeros(4, 70, dtype=torch.uint8)
    pool = PackedPool("kv", [LayerTensors(0, {"kv": pages})], PackedPage(4, 12, 4))
    coverage = _of_engine({"pages": pages}, pool)
    assert [(u.name, u.size_bytes) for u in coverage.uncovered] == [("kv/kv.0", 24)]
    assert coverage.ratio == 256 / 280


def test_several_tensors_in_one_storage_are_told_apart():
    """And bytes beside them."""
    whole = torch.zeros(4, 10)
    tensors = {"a": whole[0], "b": whole[1], "c": whole[2]}
    coverage = _of_engine(tensors, RowPool("full", kv_layers([whole[:1]], [whole[2:3]])))
    assert [(u.name, u.size_bytes) for u in coverage.uncovered] == [("b", 40), ("beside 'a', 'b', 'c'", 40)]
    assert coverage.guarded_bytes == 80


def test_a_copy_of_the_pool_guards_nothing_of_the_engine():
    """Regions that describe other memory."""
    tensors, _ = _engine(1)
    copies = kv_layers([tensors["k_buffer[0]"].clone()], [tensors["v_buffer[0]"]])
    coverage = _of_engine(tensors, RowPool("full", copies))
    assert (coverage.ratio, coverage.uncovered[0].name) == (0.5, "k_buffer[0]")
