"""Walks through a tree that changes in between, over nodes like SGLang's."""

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from canary_sglang.prefix_cache.host_nodes import check_host_nodes
from canary_sglang.prefix_cache.tree import HostRadix, Radix
from canary_sglang.prefix_cache.walk import Limit, NodeWalk

from canary_core import PayloadRecords

pytestmark = pytest.mark.without_engine

NODES = count(1)


class Key:
    """Tokens, as far as a walk asks for them."""

    def __init__(self, tokens: list[int]) -> None:
        self.token_ids = tokens

    def __len__(self) -> int:
        return len(self.token_ids)

    def child_key(self, page_size: int) -> int:
        return self.token_ids[0]


def node(parent: Any, tokens: list[int], first_slot: int) -> Any:
    """A new node below ``parent``, its slots in a row."""
    slots = torch.arange(first_slot, first_slot + len(tokens))
    new = SimpleNamespace(
        id=next(NODES), parent=parent, key=Key(tokens), value=slots, host_value=None, lock_ref=0, children={}
    )
    if parent is not None:
        parent.children[tokens[0]] = new
    return new


@pytest.fixture
def cache():
    """A root, two nodes below it, the first with two children."""
    root = node(None, [], 0)
    one = node(root, [1, 2, 3, 4], 10)
    node(one, [5, 6], 20)
    node(one, [7, 8, 9], 30)
    node(root, [2, 2], 40)
    return SimpleNamespace(root_node=root, page_size=1, evictable_size_=11, protected_size_=0)


def walked(walk: NodeWalk, limit: Limit, between: Any = None) -> list[tuple[int, list[int], list[int] | None]]:
    """Runs as (first position, slots, slot before), in order of their slots."""
    found = []
    for moment in range(100):
        piece = walk.next(limit, moment)
        found += [(r.first, r.slots.tolist(), None if r.before is None else r.before.tolist()) for r in piece.runs]
        assert piece.broken == []
        if walk.ended:
            return sorted(found, key=lambda run: run[1])
        if between is not None:
            between(moment)
    raise AssertionError("the walk does not end")


WHOLE = [(0, [10, 11, 12, 13], None), (4, [20, 21], [13]), (4, [30, 31, 32], [13]), (0, [40, 41], None)]


def test_a_whole_tree(cache):
    """Every node, with its positions, and the slot before it."""
    walk = NodeWalk(Radix(cache))
    assert walked(walk, Limit(100, 100)) == WHOLE
    assert (walk.nodes, walk.tokens, walk.vanished, walk.sizes_checked) == (4, 11, 0, True)


@pytest.mark.parametrize("limit", [Limit(1, 100), Limit(2, 100), Limit(100, 3), Limit(100, 1)])
def test_in_pieces(cache, limit):
    """Each slot once, whatever a piece may hold; sizes are not judged over several moments."""
    walk = NodeWalk(Radix(cache))
    runs = walked(walk, limit)
    assert sorted(slot for _, slots, _ in runs for slot in slots) == [s for _, slots, _ in WHOLE for s in slots]
    positions = {slot: first + i for first, slots, _ in runs for i, slot in enumerate(slots)}
    assert positions == {slot: first + i for first, slots, _ in WHOLE for i, slot in enumerate(slots)}
    before = {slots[0]: prior for _, slots, prior in runs}
    assert all(before[s] == (None if p == 0 else [s - 1] if p < 4 or s in (21, 31, 32) else [13])
               for s, p in positions.items() if s in before)  # fmt: skip
    assert walk.sizes_checked is False


def test_what_is_gone_is_skipped(cache):
    """A node that is evicted before its turn is counted, and nothing is said of it."""
    walk = NodeWalk(Radix(cache))

    def evict(moment: int) -> None:
        cache.root_node.children.pop(1, None)

    runs = walked(walk, Limit(1, 100), evict)
    assert runs == [(0, [40, 41], None)]
    assert walk.vanished == 1


def test_a_split_above_a_node_is_walked_with_it(cache):
    """A node is split into a new parent and itself before its turn: both are walked."""
    walk = NodeWalk(Radix(cache))
    root, one = cache.root_node, cache.root_node.children[1]

    def split(moment: int) -> None:
        if one.parent is not root:
            return
        above = SimpleNamespace(
            id=next(NODES), parent=root, key=Key([1, 2]), value=one.value[:2].clone(), lock_ref=0, children={3: one}
        )
        root.children[1] = above
        one.parent, one.key, one.value = above, Key([3, 4]), one.value[2:].clone()

    runs = walked(walk, Limit(1, 100), split)
    assert runs == [(0, [10, 11], None), (2, [12, 13], [11]), *WHOLE[1:]]
    assert walk.vanished == 0


def test_a_node_that_is_split_while_it_is_walked_begins_anew(cache):
    """Its first half was walked; then its slots are others."""
    one = cache.root_node.children[1]
    cache.root_node.children.pop(2)
    cache.evictable_size_ = 9
    walk = NodeWalk(Radix(cache))
    first = walk.next(Limit(1, 2), 0)
    assert [run.slots.tolist() for run in first.runs] == [[10, 11]]
    one.value = one.value.clone()
    assert walked(walk, Limit(100, 100))[0] == WHOLE[0]


def test_a_flush_ends_it(cache):
    """Another root: what was left is gone."""
    walk = NodeWalk(Radix(cache))

    def flush(moment: int) -> None:
        cache.root_node = node(None, [], 0)

    walked(walk, Limit(1, 100), flush)
    assert walk.vanished == 1
    assert walk.sizes_checked is False


@pytest.mark.parametrize(
    ("rule", "breaks"),
    [
        ("lock_ref", lambda one: setattr(one, "lock_ref", -1)),
        ("lock_order", lambda one: setattr(one.children[5], "lock_ref", 2)),
        ("parent", lambda one: setattr(one.children[5], "parent", one.children[7])),
        ("key", lambda one: one.children.update({6: one.children.pop(5)})),
        ("length", lambda one: setattr(one, "value", one.value[:3])),
        ("sizes", lambda one: setattr(one.children[5], "lock_ref", 0) or one.children.pop(5)),
    ],
)
def test_contradictions_are_named(cache, rule, breaks):
    """Each by its rule."""
    breaks(cache.root_node.children[1])
    piece = NodeWalk(Radix(cache)).next(Limit(100, 100), 0)
    assert rule in {broken.rule for broken in piece.broken}


def test_a_count_below_zero_is_not_held_against_children(cache):
    """A node was released once too often: that is told of it, and nothing of children that nobody holds."""
    one = cache.root_node.children[1]
    for child in one.children.values():
        child.lock_ref = 0
    one.lock_ref = -1
    piece = NodeWalk(Radix(cache)).next(Limit(100, 100), 0)
    assert [(broken.node, broken.rule) for broken in piece.broken if broken.rule != "sizes"] == [(one.id, "lock_ref")]


@pytest.fixture
def tiered(cache):
    """The same with copies in host memory of the first node and all below it, of which one has left the device."""
    one = cache.root_node.children[1]
    for first, some in ((0, one), (4, one.children[5]), (6, one.children[7])):
        some.host_value = torch.arange(first, first + len(some.key))
    one.children[7].value = None
    cache.evictable_size_ = 8
    return cache


class Parked:
    """Records of host slots that are known, as (token, position)."""

    slots = 9

    def __init__(self) -> None:
        self.host_pool = SimpleNamespace(slot_used=torch.ones(self.slots, dtype=torch.bool))
        self.known = torch.ones(self.slots, dtype=torch.bool)
        self.table = torch.zeros(self.slots, 8, dtype=torch.int32)
        self.table[:, 0] = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 9])
        self.table[:, 1] = torch.tensor([0, 1, 2, 3, 4, 5, 4, 5, 6]) * 8 + 1

    def records(self, slots: torch.Tensor) -> PayloadRecords:
        known, record = self.known[slots], self.table[slots]
        return PayloadRecords(known, known.clone(), record[:, 0].long(), record[:, 1].long() // 8)


@pytest.mark.parametrize("limit", [Limit(100, 100), Limit(100, 2)])
def test_nodes_in_host_memory_are_walked_too(tiered, limit):
    """Those on the device are gathered, all that have copies are compared on the host, also in pieces."""
    walk, parked = NodeWalk(HostRadix(tiered)), Parked()
    slots, compared = [], 0
    for moment in range(100):
        piece = walk.next(limit, moment)
        slots += [slot for run in piece.runs for slot in run.slots.tolist()]
        broken, count = check_host_nodes(parked, piece.host_runs, 100)
        assert piece.broken == broken == []
        compared += count
        if walk.ended:
            break
    assert sorted(slots) == [10, 11, 12, 13, 20, 21, 40, 41]
    assert (walk.on_host, walk.tokens, compared) == (1, 8, 9)


@pytest.mark.parametrize("breaks", ["token", "position", "free", "beyond", "unknown"])
def test_host_slots_are_compared_with_what_went_there(tiered, breaks):
    """Another token or position, a slot that is free or does not exist: each at its node; what is not known is not
    judged."""
    parked, one = Parked(), tiered.root_node.children[1]
    if breaks in ("token", "unknown"):
        parked.table[8, 0] += 1
        parked.known[8] = breaks == "token"
    elif breaks == "position":
        parked.table[8, 1] += 8
    elif breaks == "free":
        parked.host_pool.slot_used[8] = False
    else:
        one.children[7].host_value[2] = 9
    piece = NodeWalk(HostRadix(tiered)).next(Limit(100, 100), 0)
    broken, compared = check_host_nodes(parked, piece.host_runs, 100)
    wanted = [] if breaks == "unknown" else [(one.children[7].id, "host")]
    assert [(b.node, b.rule) for b in broken] == wanted
    assert compared == 9 - (breaks in ("unknown", "beyond"))


@pytest.mark.parametrize("breaks", ["dead", "above", "length"])
def test_tiers_follow_each_other(tiered, breaks):
    """A node that is nowhere, one on the device below one that isn't, and one with too few host slots."""
    one = tiered.root_node.children[1]
    if breaks == "dead":
        one.children[7].host_value = None
    elif breaks == "above":
        one.value = None
    else:
        one.children[7].host_value = one.children[7].host_value[:2]
    found = NodeWalk(HostRadix(tiered)).next(Limit(100, 100), 0).broken
    wanted = one.children[5].id if breaks == "above" else one.children[7].id
    assert [b.node for b in found if b.rule == "tier"] == [wanted]
