"""The report of how a sliding window's slots lie beside those of the full pool."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from canary_sglang.pools.window_divergence import FIELDS, WindowDivergence

from canary_core import BatchView, Canary, CanaryConfig, KVSource, Region, RegionKind, SlotTable

pytestmark = pytest.mark.timeout(900)

WINDOW = 3


@pytest.fixture
def told(findings):
    """Two requests, of five and two tokens in the cache, one more to write each; two positions have left the window."""
    tensor = torch.zeros(16, 8)
    slot_map = torch.zeros(17, dtype=torch.int64)
    source = KVSource(tensor, "k", 0, chunk_bytes=32, slot_stride_bytes=32)
    region = Region("swa", 16, (source,), RegionKind.WINDOW, WINDOW, slot_map=slot_map, null_slot=0)
    canary = Canary([region], CanaryConfig.load(divergence_interval=2, silence_s=0))
    entries = torch.zeros(4, 10, dtype=torch.int32)
    entries[1, :6] = torch.tensor([1, 2, 3, 4, 5, 6])
    entries[3, :3] = torch.tensor([7, 8, 9])
    slot_map[3:10] = torch.tensor([3, 4, 5, 6, 9, 8, 7])
    batch = SimpleNamespace(req_pool_indices=torch.tensor([1, 3]), seq_lens_cpu=torch.tensor([6, 3]))
    view = BatchView(
        prefix_lens=torch.tensor([5, 2]),
        new_lens=torch.tensor([1, 1]),
        token_ids=torch.tensor([1, 2]),
        writers=torch.tensor([0, 1]),
        tables={"swa": SlotTable(entries, rows=batch.req_pool_indices)},
    )

    def run(forwards: int) -> list[Any]:
        report = WindowDivergence(canary, entries)
        for _ in range(forwards):
            report.before(batch, view)
        report.close()
        return [event for event in findings.events if event.name == "window_divergence"]

    return SimpleNamespace(run=run, slot_map=slot_map, canary=canary)


@pytest.mark.without_engine
def test_what_is_counted(told):
    """Entries that the checks look at, live ones, those with another number in the window's pool, and those that have
    left the window."""
    (event,) = told.run(3)
    counted = {name: event.fields[name] for name in FIELDS}
    assert counted == {
        "full_entries": 7, "window_entries": 4, "live_entries": 9, "diverged": 2, "out_of_window": 2,
        "evicted_inside": 0,
    }  # fmt: skip
    assert (event.name, event.level, event.fields["region"]) == ("window_divergence", "info", "swa")
    assert told.canary.stats()["divergence_reports"] == 1


@pytest.mark.without_engine
def test_what_was_evicted_too_early_is_an_error(told):
    """An entry that the forward still reads, without a slot."""
    told.slot_map[4] = 0
    events = told.run(4)
    assert [event.level for event in events] == ["error", "error"]
    assert {event.fields["evicted_inside"] for event in events} == {1}
    assert {event.fields["out_of_window"] for event in events} == {3}


@pytest.mark.without_engine
def test_off_is_off(told, monkeypatch):
    """Without an interval nothing is counted."""
    monkeypatch.setattr(told.canary, "config", told.canary.config.model_copy(update={"divergence_interval": 0}))
    assert told.run(4) == []


def test_on_a_real_engine(start):
    """A sliding window on real SGLang: reports come every third forward, windows are left, nothing is evicted within
    one."""
    engine = start("swa", CANARY_DIVERGENCE_INTERVAL="3")
    setup = engine.setup
    steps = engine.serve(prompts=setup.traffic(0, 4), new_tokens=80)["steps"]
    assert engine.findings()["violations"] == []
    reports = [event for event in engine.events() if event["name"] == "window_divergence"]
    assert len(reports) in (steps // 3 - 1, steps // 3)
    assert {(event["region"], event["level"], event["evicted_inside"]) for event in reports} == {("swa", "info", 0)}
    assert all(0 <= event["window_entries"] <= event["full_entries"] < event["live_entries"] for event in reports)
    assert all(event["out_of_window"] + event["diverged"] <= event["live_entries"] for event in reports)
    assert any(event["out_of_window"] for event in reports)
