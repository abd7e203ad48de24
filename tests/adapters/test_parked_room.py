"""Room for proofs of parked prefixes where the prefix cache fills the pool, and what is told where there is none."""

from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import pytest

from canary_adapters import parked_blocks, recompute_requests
from canary_adapters.internal_requests import InternalRequests
from canary_adapters.parked_prefixes import PROOF_SHARE, ParkedPrefix, ParkedPrefixes
from canary_adapters.recompute_requests import Recomputes
from canary_adapters.touched_requests import TouchedRequests
from canary_core import recomputer

BLOCKS = 1000
MOST = int(BLOCKS * PROOF_SHARE)


class Pool:
    """Blocks like vLLM's, free from the first on. ``plain``: so many have no key. ``puts``: whether blocks are put back
    in front."""

    def __init__(self, plain=0, free=BLOCKS, puts=True):
        numbers = range(BLOCKS)
        self.blocks = [SimpleNamespace(block_id=n, block_hash=None if n < plain else f"key {n}") for n in numbers]
        self.evicted = []
        head, tail = SimpleNamespace(), SimpleNamespace()
        for block, following in zip([head, *self.blocks[:free]], [*self.blocks[:free], tail], strict=True):
            block.next_free_block = following
        self.free_block_queue = SimpleNamespace(fake_free_list_head=head, fake_free_list_tail=tail)
        if puts:
            self.free_block_queue.prepend_n = None

    def evict_blocks(self, numbers):
        for number in numbers:
            self.blocks[number].block_hash = None
        self.evicted += sorted(numbers)


def held(blocks, groups=1):
    """Those of a prefix at the end of the pool."""
    return [[*range(BLOCKS - blocks, BLOCKS)]] * groups


def room(pool, blocks):
    """Whether there is some, and what was counted."""
    known = ParkedPrefixes(100)
    return parked_blocks.room_for_proof(pool, blocks, known), known.counted().get("parked_evicted", 0)


def test_proofs_take_the_blocks_in_front_and_the_same_ones_again():
    """As many as the longest needs, and what has no key anyway."""
    pool = Pool(plain=2)
    assert room(pool, held(1)) == (True, 0)
    assert room(pool, held(4)) == (True, 3)
    assert [room(pool, held(n))[1] for n in (4, 2, 5, 1, 5)] == [0, 0, 1, 0, 0]
    assert pool.evicted == [2, 3, 4, 5]
    assert room(Pool(), held(3, groups=2)) == (True, 8)


@pytest.mark.parametrize(
    ("pool", "blocks"),
    [(Pool(), held(MOST)), (Pool(), [[2, 500]]), (Pool(puts=False), held(4)), (Pool(free=3), held(4)),
     (Pool(plain=MOST), held(MOST))],
    ids=["too long", "its own", "put back behind", "too few", "two more"],
)  # fmt: skip
def test_nothing_is_evicted_beyond_a_hundredth_or_of_the_prefix_itself(pool, blocks):
    """Nor by a release that puts blocks without a key behind all others: each proof would take further ones."""
    assert room(pool, blocks) == (False, 0)
    assert pool.evicted == []


def test_a_long_prefix_has_room_where_blocks_have_no_key():
    """As before the prefix cache has filled the pool."""
    assert room(Pool(plain=100), held(80)) == (True, 0)


@dataclass(slots=True, eq=False, kw_only=True)
class Prefix(ParkedPrefix):
    """One that is there."""

    def left(self):
        return len(self.content)

    def blocks(self):
        return ()


def test_an_idle_engine_that_passes_prefixes_over_for_long_says_so(monkeypatch):
    """Also where others are proven; not where one was without room a few times."""
    monkeypatch.setattr(recomputer, "STARVED_LOOKS", 4)
    told = []
    monkeypatch.setattr(recompute_requests, "emit", told.append)
    known = ParkedPrefixes(10_000)
    for name in ("long", "short"):
        known.add(Prefix(name=name, content=range(64)))
    engine = mock.create_autospec(InternalRequests, instance=True, parked=known)
    engine.prefix.side_effect = lambda name: None
    engine.hindered.return_value = engine.find.return_value = None
    now = [0.0]
    recomputes = Recomputes(engine, TouchedRequests(), recompute_requests.RecomputeShare(1.0), clock=lambda: now[0])

    def looks(times, fits):
        engine.spare.side_effect = fits
        for _ in range(times):
            now[0] += 10.0
            recomputes._proofs._idle_since = None
            recomputes.idle()

    looks(3, lambda name: False)
    looks(1, lambda name: True)
    looks(3, lambda name: name.endswith("short"))
    assert told == []
    looks(2, lambda name: name.endswith("short"))
    assert [event.fields["reason"] for event in told] == [recompute_requests.NO_CHOICE["parked_no_room"]]
    assert recomputes.counted()["parked_no_room"] == 8
