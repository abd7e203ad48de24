"""Regions whose rows tokens hold in turn until their group is complete: a compressor's rings."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from canary_adapters import Part, block_table, ring_table, row_source, slot_table
from canary_core import BatchView, Canary, CanaryConfig, Region, RegionKind
from canary_core.errors import AttachError
from canary_core.plugins import private_hooks
from canary_core.region import Role
from canary_core.testing import Findings

REQUESTS, PAGE, ROWS, GROUP, OWN_GROUP = 3, 16, 8, 4, 32
PAGES = 40


class Engine:
    """Requests whose tokens have a row in the ring of their page (``pages``: groups of `GROUP` tokens, which overlap),
    and one in the ring of their request (``own``: groups of `OWN_GROUP`). Like a compressor it stores only rows that
    can be read later."""

    def __init__(self, scrub: str) -> None:
        self.findings = Findings()
        self.page_rows = torch.randn(PAGES * ROWS, 16)
        self.own_rows = torch.randn((REQUESTS + 1) * OWN_GROUP, 16)
        self.lengths = [0] * REQUESTS
        numbers = torch.randperm(PAGES - 1)[: REQUESTS * 12].view(REQUESTS, 12) + 1
        self.table = (numbers[..., None] * PAGE + torch.arange(PAGE)).view(REQUESTS, -1)
        # The window's pages are others than the table's.
        page = torch.cat((torch.zeros(1, dtype=torch.long), torch.randperm(PAGES - 1) + 1))
        self.map = (page[:, None] * PAGE + torch.arange(PAGE)).flatten()
        pages = Region(
            "pages",
            PAGES * ROWS,
            (row_source(self.page_rows, Part("kv", 0, role=Role.STATE)),),
            RegionKind.RING,
            slot_map=self.map,
            null_slot=0,
            group_tokens=GROUP,
            overlap_tokens=GROUP,
            page_ring=(PAGE, ROWS),
        )
        own = row_source(self.own_rows, Part("kv", 0, role=Role.STATE))
        rings = Region("own", len(self.own_rows), (own,), RegionKind.RING, null_slot=0, group_tokens=OWN_GROUP)
        self.numbers = torch.arange(REQUESTS + 1)[:, None]
        self.canary = Canary([pages, rings], CanaryConfig.load(scrub_budget=scrub), hooks=private_hooks(self.findings))

    @property
    def found(self):
        """What was found so far."""
        return [(v.kind.name, v.region, v.phase.name, v.slot) for v in self.findings.violations]

    def page_row(self, request: int, position: int) -> int:
        """Row of a token in ``page_rows``."""
        slot = int(self.map[self.table[request, position]])
        return slot // PAGE * ROWS + slot % ROWS

    def step(self, news: list[int]) -> None:
        """One forward of so many new tokens for each request."""
        lengths = torch.tensor(self.lengths)
        requests = torch.arange(REQUESTS)
        slots = torch.cat([self.table[r, n : n + new] for r, n, new in zip(requests, lengths, news, strict=True)])
        batch = BatchView(
            prefix_lens=lengths,
            new_lens=torch.tensor(news),
            token_ids=torch.randint(0, 1 << 30, (sum(news),)),
            writers=requests,
            tables={
                "pages": slot_table(self.table, requests, slots),
                "own": ring_table(block_table(self.numbers, OWN_GROUP, requests + 1), OWN_GROUP),
            },
        )
        self.canary.step.before(batch)
        for request, new in enumerate(news):
            end = self.lengths[request] + new
            for position in range(self.lengths[request], end):
                if position >= end // GROUP * GROUP - GROUP or position % PAGE >= PAGE - GROUP:
                    self.page_rows[self.page_row(request, position)] = torch.randn(16)
                if position >= end // OWN_GROUP * OWN_GROUP:
                    self.own_rows[(request + 1) * OWN_GROUP + position % OWN_GROUP] = torch.randn(16)
            self.lengths[request] = end
        self.canary.step.after(batch)
        self.canary.step.end()
        self.canary.drain()


@pytest.fixture(params=["0"])
def engine(request):
    """A fresh one; the parameter is its scrub's budget."""
    torch.manual_seed(0)
    made = Engine(request.param)
    yield made
    made.canary.close()


@pytest.mark.parametrize("engine", ["1MiB"], indirect=True)
@pytest.mark.parametrize("seed", range(4))
def test_clean_traffic_raises_nothing(engine, seed):
    """Forwards of any lengths, which store only what can be read later: no finding, nothing left unjudged, though rows
    are taken over all the time and some of those that count as written are what they were."""
    rng = random.Random(seed)
    while max(engine.lengths) < 12 * PAGE - 40:
        engine.step([rng.choice([0, 1, 1, 1, 2, 5, 17, 40]) for _ in range(REQUESTS)])
    assert engine.found == []
    assert engine.canary.stats()["checked_slots"] > 0
    assert engine.canary.stats()["unknown_slots"] == 0


def test_only_a_forward_that_completes_a_group_reads(engine):
    """It reads the group so far and the overlap; any other one reads nothing."""
    engine.step([22, 22, 22])
    checked = [0]
    for _ in range(4):
        engine.step([1, 1, 1])
        checked.append(engine.canary.stats()["checked_slots"])
    # Tokens 22 and 24 complete nothing, 23 does: with the overlap that are tokens 16 to 22.
    assert [b - a for a, b in pairwise(checked)] == [0, 7 * REQUESTS, 0, 0]


@pytest.mark.parametrize("position", range(16, 23))
def test_a_flip_in_any_row_that_will_be_read_is_found_before(engine, position):
    """Also in the rows of the group before."""
    engine.step([22, 0, 0])
    engine.step([1, 0, 0])
    row = engine.page_row(0, position)
    engine.page_rows[row, 3] += 1
    engine.step([1, 0, 0])
    assert engine.found == [("BYTES", "pages", "PRE_FORWARD", row)]


def test_a_flip_in_the_page_before_is_found_where_a_page_begins(engine):
    """What a cached prefix hands on: the last rows of its last page, however much of it came in one forward."""
    engine.step([64, 0, 0])
    row = engine.page_row(0, 63)
    engine.page_rows[row, 3] += 1
    engine.step([4, 0, 0])
    assert engine.found == [("BYTES", "pages", "PRE_FORWARD", row)]


def test_a_flip_in_a_requests_own_ring_is_found(engine):
    """When its group is complete, many steps later."""
    engine.step([40, 0, 0])
    row = OWN_GROUP + 35 % OWN_GROUP
    engine.own_rows[row, 3] += 1
    for _ in range(24):
        engine.step([1, 0, 0])
    assert engine.found == [("BYTES", "own", "PRE_FORWARD", row)]


def test_a_row_of_another_token_is_found(engine):
    """A page of the table is exchanged for another request's: its rows are of other tokens."""
    engine.step([21, 30, 0])
    engine.table[0, 16:20] = engine.table[1, 16:20]
    engine.step([3, 0, 0])
    assert {finding[:3] for finding in engine.found} == {("POSITION", "pages", "PRE_FORWARD")}


@pytest.mark.parametrize(
    "wrong",
    [
        {"group_tokens": 0},
        {"kind": RegionKind.FULL},
        {"overlap_tokens": -1},
        {"page_ring": (15, 8)},
        {"page_ring": (16, 4)},
        {"kind": RegionKind.FULL, "group_tokens": 0, "overlap_tokens": 0},
    ],
)
def test_rings_that_do_not_go_together_are_refused(engine, wrong):
    """Rows must divide a page and hold a group with its overlap; only rings have groups."""
    with pytest.raises(AttachError):
        replace(engine.canary.regions["pages"], **wrong)
