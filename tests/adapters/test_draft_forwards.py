"""`DraftForwards`: a draft model that has the served model's tables, on a tiny engine that drafts two tokens."""

from functools import partial

import pytest
import torch

from canary_adapters import DraftForwards, block_table
from canary_core import BatchView, Canary, CanaryConfig, Kind, KVSource, Region

PAGE, SLOTS, STEPS = 4, 32, 2


class Engine:
    """One request, whose tokens lie in pages 1, 3, 2 and 5 of both models' pools."""

    def __init__(self) -> None:
        self.pools = {name: torch.zeros(SLOTS, 4) for name in ("full", "draft")}
        regions = [Region(n, SLOTS, (KVSource(p, "k", i, 16, 16),)) for i, (n, p) in enumerate(self.pools.items())]
        self.canary = Canary(
            regions, CanaryConfig(read_check=-1, scrub_budget="1GiB", silence_s=0.0, log_level="error")
        )
        self.table = torch.tensor([[1, 3, 2, 5]], dtype=torch.int32)
        self.drafts = DraftForwards(self.canary, ["draft"], STEPS)

    def slots(self, first, end):
        """Those of positions ``first`` to ``end``."""
        positions = torch.arange(first, end)
        return self.table[0, positions // PAGE].long() * PAGE + positions % PAGE

    def write(self, pool, first, end):
        """Something new."""
        self.pools[pool][self.slots(first, end)] = torch.rand(end - first, 4) + 1

    def step(self, prefix, new, guesses=(), skip=False):
        """The served model computes ``new`` tokens; then the drafter does, but for those in ``guesses``, whose
        positions it writes last."""
        table = block_table(self.table, PAGE, write_slots=self.slots(prefix, prefix + new))
        view = BatchView(
            prefix_lens=torch.tensor([prefix]),
            new_lens=torch.tensor([new]),
            token_ids=torch.arange(prefix, prefix + new) + 100,
            writers=torch.tensor([self.canary.writers.id("alice")]),
            tables=dict.fromkeys(("full", "draft"), table),
        )
        self.canary.step.run(partial(self.write, "full", prefix, prefix + new), lambda: self.drafts.split(view))
        if not skip:
            self.drafts.run(partial(self.draft, prefix, prefix + new, guesses))

    def draft(self, first, end, guesses):
        """A drafter's run."""
        for position in range(first, end):
            if position not in guesses:
                self.write("draft", position, position + 1)
        for position in guesses:
            self.write("draft", position, position + 1)

    def found(self):
        """Kind and region of each incident."""
        self.canary.drain()
        return [(incident.root.kind, incident.root.region) for incident in self.canary.incidents]


@pytest.fixture
def engine():
    """Closed at the end."""
    engine = Engine()
    yield engine
    engine.canary.close()


def drafted(engine):
    """A prompt; a verification of which the drafts are rejected, so that guesses are written over them; a step in which
    nothing was drafted, whose guesses lie where rejected tokens were recorded."""
    engine.step(0, 5, guesses=(5, 6))
    engine.step(5, 3, guesses=(6, 7))
    engine.step(6, 1, guesses=(7, 8))


def test_rejected_drafts_and_guesses_are_no_findings(engine):
    """Whatever a drafter writes, or leaves out, behind the last accepted token."""
    drafted(engine)
    engine.step(7, 3, guesses=(8, 9, 10))
    engine.step(8, 2)
    assert engine.found() == []
    assert engine.canary.stats()["checked_forwards"] == 10


def test_what_changes_between_runs_is_told(engine):
    """A bit of the draft model's KV, of a position that was accepted."""
    drafted(engine)
    engine.pools["draft"][engine.slots(5, 6)[0], 2] += 1
    engine.step(7, 1)
    assert engine.found() == [(Kind.BYTES, "draft")]


def test_steps_without_a_drafter_are_not_judged(engine):
    """An engine that does not draft for a while leaves gaps in the draft model's KV, which its later runs read."""
    drafted(engine)
    for position in range(7, 12):
        engine.step(position, 1, skip=True)
    engine.step(12, 1, guesses=(13, 14))
    engine.step(13, 1)
    assert engine.found() == []
