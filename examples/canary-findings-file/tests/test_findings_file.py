"""Findings become lines of JSON, and an engine never waits for them."""

import json

import pytest
import torch
from canary_findings_file import FindingsFile

from canary_adapters import RowPool, kv_layers, slot_table
from canary_core import BatchView, Canary, CanaryConfig, private_hooks

ROWS = 16


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The file that findings are written to."""
    monkeypatch.setenv("FINDINGS_FILE", str(tmp_path / "findings.jsonl"))
    return tmp_path / "findings.jsonl"


def serve(reporter, flips):
    """Two forwards of one request; in between a bit of each of its first ``flips`` tokens is flipped."""
    k, v = (torch.zeros(ROWS, 2, 4) for _ in range(2))
    canary = Canary(
        RowPool("kv", kv_layers([k], [v])).regions(),
        CanaryConfig.load(mode="log", read_check=-1),
        hooks=private_hooks(reporter),
    )
    table = torch.arange(ROWS, dtype=torch.int32)[None]

    def forward(prefix, tokens):
        def write():
            k[prefix : prefix + len(tokens)] = torch.randn(len(tokens), 2, 4)
            v[prefix : prefix + len(tokens)] = torch.randn(len(tokens), 2, 4)

        view = BatchView(
            prefix_lens=torch.tensor([prefix]),
            new_lens=torch.tensor([len(tokens)]),
            token_ids=torch.tensor(tokens),
            writers=torch.tensor([canary.writers.id("a")]),
            tables={"kv": slot_table(table)},
        )
        canary.step.run(write, lambda: view)

    forward(0, [5, 6, 7])
    v.view(torch.int32)[:flips, 0, 0] ^= 1
    forward(3, [8])
    canary.close()
    reporter.flush()


def test_each_finding_is_a_line(path):
    """With its fields and the time; the last line counts them by kind."""
    serve(FindingsFile(), flips=2)
    *findings, counts = map(json.loads, path.read_text().splitlines())
    assert [(f["event"], f["kind"], f["source"], f["slot"]) for f in findings] == [
        ("finding", "bytes", "v.0", 0),
        ("finding", "bytes", "v.0", 1),
    ]
    assert all(f["time"] and f["explanation"] for f in findings)
    assert (counts["event"], counts["bytes"], counts["regions"]) == ("counts", 2, ["kv"])


def test_without_findings_there_is_one_line(path):
    """A pool that was closed, and nothing was found."""
    serve(FindingsFile(), flips=0)
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["event"] == "counts"


def test_a_file_that_cannot_be_written_stops_nobody(tmp_path, monkeypatch):
    """Findings that could not be written are counted."""
    monkeypatch.setenv("FINDINGS_FILE", str(tmp_path))
    reporter = FindingsFile()
    serve(reporter, flips=1)
    assert (reporter.counts["bytes"], reporter.counts["dropped"]) == (1, 2)


def test_without_a_file_the_plugin_is_refused(monkeypatch):
    """The sentence says what to set."""
    monkeypatch.delenv("FINDINGS_FILE", raising=False)
    with pytest.raises(ValueError, match="FINDINGS_FILE must name"):
        FindingsFile().canary_configure(config=CanaryConfig.load())
