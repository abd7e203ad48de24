"""What a prefix cache says that its slots hold, against the records."""

import pytest
import torch
from support.toy import ToyEngine

from canary_core import Canary, CanaryConfig
from canary_core.records import POSITION, STATES, TOKEN, Kind, Phase, State
from canary_core.watchers.prefix_cache.runs import CachedRun, FreeList
from canary_core.watchers.prefix_cache.sweep import RecordSweep, SweepResult

TOKENS = [5, 9, 5, 7, 30, 31, 8, 8, 2, 3]


class Cache:
    """A toy engine that has served one request, whose slots are cached in two nodes."""

    def __init__(self, window: int = 0) -> None:
        self.engine = ToyEngine(window=window)
        self.canary = Canary(self.engine.regions(), CanaryConfig.load(), writers=self.engine.writers)
        self.request = self.engine.submit("a", TOKENS)
        while self.request.cached < len(TOKENS):
            self.engine.step(self.canary, chunk=4)
        self.slots = torch.tensor(self.request.slots)

    def runs(self, split: int = 6, absent: tuple[str, ...] = ()) -> list[CachedRun]:
        tokens, none = torch.tensor(TOKENS), frozenset[str]()
        return [
            CachedRun(1, 0, self.slots[:split], None, tokens[:split], frozenset(absent)),
            CachedRun(2, split, self.slots[split:], self.slots[split - 1 : split], tokens[split:], none),
        ]

    def judge(self, runs: list[CachedRun], free: tuple[FreeList, ...] = ()) -> SweepResult:
        sweep = RecordSweep(self.canary)
        assert sweep.issue(runs, free)
        (judged,) = sweep.collect()
        assert sweep.collect() == []
        return judged


@pytest.mark.parametrize("split", [1, 6, 9])
def test_what_was_written_is_clean(split):
    """Nodes that hold what forwards wrote raise nothing, wherever they are split."""
    cache = Cache()
    judged = cache.judge(cache.runs(split))
    assert (judged.findings, judged.found, judged.slots, judged.unknown) == ([], 0, len(TOKENS), 0)
    assert judged.shared == []
    assert judged.numbers.tolist() == cache.request.slots


def test_nothing_is_nothing():
    """Without runs nothing is read."""
    assert not RecordSweep(Cache().canary).issue([])


def test_exchanged_slots_are_found_at_their_node():
    """Two slots of a node changed places: both hold another position."""
    cache = Cache()
    cache.slots[[7, 8]] = cache.slots[[8, 7]]
    judged = cache.judge(cache.runs())
    assert [(v.kind, v.node, v.position, v.stored_position, v.phase) for v in judged.findings] == [
        (Kind.POSITION, 2, 7, 8, Phase.SWEEP),
        (Kind.POSITION, 2, 8, 7, Phase.SWEEP),
    ]
    assert {v.stored_request for v in judged.findings} == {"a"}


def test_another_token_is_found():
    """A slot whose record is of another token; where the cache tells no tokens, the prefix hash says so."""
    cache = Cache()
    cache.canary.states["full"].records[cache.slots[3], TOKEN] += 1
    (found,) = cache.judge(cache.runs()).findings
    assert (found.kind, found.node, found.slot, found.token) == (Kind.TOKEN, 1, int(cache.slots[3]), TOKENS[3])
    unknown = [CachedRun(None, run.first, run.slots, run.before) for run in cache.runs()]
    (found,) = cache.judge(unknown).findings
    assert (found.kind, found.slot, found.position) == (Kind.PREFIX, int(cache.slots[3]), 3)


def test_what_is_no_token_is_not_judged():
    """Keys may hold hashes of images in the place of tokens."""
    cache = Cache()
    (first, second) = cache.runs()
    first.tokens[2] = 1 << 40
    sweep = RecordSweep(cache.canary, vocabulary=1000)
    sweep.issue([first, second])
    (judged,) = sweep.collect()
    assert judged.found == 0


@pytest.mark.parametrize(
    ("state", "kind"),
    [(State.UNWRITTEN, Kind.UNWRITTEN), (State.ALLOCATED, Kind.UNWRITTEN), (State.FREED | State.WRITTEN, Kind.FREED)],
)
def test_slots_that_hold_nothing_are_found(state, kind):
    """A cached slot that no forward wrote, or that was freed."""
    cache = Cache()
    record = cache.canary.states["full"].records[cache.slots[6]]
    record[POSITION] = 6 * STATES + int(state)
    (found,) = cache.judge(cache.runs()).findings
    assert (found.kind, found.node, found.position) == (kind, 2, 6)


def test_unknown_slots_are_counted_and_not_judged():
    """Bytes that arrived without a forward."""
    cache = Cache()
    cache.canary.slots.forget("full", cache.slots[2:5])
    judged = cache.judge(cache.runs())
    assert (judged.found, judged.unknown) == (0, 3)


def test_events_that_wait_take_effect_first():
    """A free that the host issued before the sweep is seen by it, as it would be by a forward."""
    cache = Cache()
    cache.canary.slots.free("full", cache.slots[:1])
    assert [v.kind for v in cache.judge(cache.runs()).findings] == [Kind.FREED]


def test_numbers_that_are_no_slots():
    """The null slot and numbers beyond the pool are findings, and nothing is read there."""
    cache = Cache()
    cache.slots[4], cache.slots[8] = 0, 1 << 40
    judged = cache.judge(cache.runs())
    assert [(v.kind, v.position, v.stored_token) for v in judged.findings] == [
        (Kind.NULL_SLOT, 4, None),
        (Kind.SLOT_RANGE, 8, None),
    ]


def test_windows_and_what_has_passed_them():
    """Slots of a window are looked up in its map; a run that has none there must have none."""
    cache = Cache(window=4)
    slot_map = cache.engine.slot_map
    inside = [i for i, s in enumerate(cache.slots.tolist()) if int(slot_map[s])]
    runs = cache.runs(inside[0], absent=("window",))
    assert cache.judge(runs).found == 0
    slot_map[cache.slots[1]] = 7
    (found,) = cache.judge(runs).findings
    assert (found.kind, found.region, found.rule, found.node, found.position, found.slot) == (
        Kind.CACHE_STRUCTURE, "window", "window_slot", 1, 1, 7,
    )  # fmt: skip


def test_cached_slots_that_are_free():
    """A slot in the cache and in a free list, by pages."""
    cache = Cache()
    slot = int(cache.slots[7])
    pages = FreeList(None, (torch.tensor([slot // 2]), torch.tensor([31])), page_size=2, slots=64)
    found = cache.judge(cache.runs(), (pages,)).findings
    assert {(v.rule, v.node) for v in found} <= {("slot_free", 1), ("slot_free", 2)}
    assert slot in {v.slot for v in found}
    assert all(v.slot is not None and v.slot // 2 == slot // 2 for v in found)


def test_slots_of_two_nodes():
    """Which runs name the same slot."""
    cache = Cache()
    first, second = cache.runs()
    again = CachedRun(3, 6, torch.cat((second.slots[:1], second.slots[2:3])), first.slots[-1:])
    judged = cache.judge([first, second, again])
    assert [(one, other) for one, other, _ in judged.shared] == [(1, 2), (1, 2)]
    assert {slot for *_, slot in judged.shared} == {int(second.slots[0]), int(second.slots[2])}


def test_findings_of_the_host_are_reported_once():
    """As those of the device are."""
    cache = Cache()
    cache.slots[[7, 8]] = cache.slots[[8, 7]]
    found = cache.judge(cache.runs()).findings
    assert [cache.canary.report(found) for _ in range(2)] == [2, 0]
    assert cache.canary.stats()["position"] == 2
