"""`RanksRollCall`: who says what to whom, over a real store of torch.distributed; the engine's part is in
`test_ranks`."""

import json
import threading
from types import SimpleNamespace

import pytest
from canary_sglang.actions import roll_call
from canary_sglang.actions.roll_call import RanksRollCall
from canary_sglang.compat import ranks
from canary_sglang.compat.ranks import ReplicaRank
from torch.distributed import HashStore

from canary_core import AttachError, CanaryConfig

pytestmark = [pytest.mark.without_engine, pytest.mark.timeout(60)]

PAIR = [ReplicaRank(0, 0), ReplicaRank(0, 1)]
GUARDED = SimpleNamespace(enabled=True, coverage=SimpleNamespace(ratio=1.0))


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Nobody is given much time."""
    monkeypatch.setattr(roll_call, "LOOK_S", 0.4)
    monkeypatch.setattr(roll_call, "WAIT_S", 0.02)


def call(calls):
    """All of ``calls`` have started; gives what was raised, once all have looked."""
    for one in calls:
        one.begin()
    for one in calls:
        one._thread.join()


def told(findings):
    """The events about ranks."""
    return [event for event in findings.events if event.name == "workers_unguarded"]


def test_ranks_that_are_guarded_alike_say_nothing(findings):
    """Each has said that it is guarded: no event, and nothing is raised; a single rank asks nobody."""
    store = HashStore()
    calls = [RanksRollCall(CanaryConfig(mode="raise"), PAIR, rank, store) for rank in (0, 1)]
    for one in calls:
        one.arrive()
        one.say(GUARDED)
    call(calls)
    for one in calls:
        one.require(wait=True)
    alone = RanksRollCall(CanaryConfig(mode="raise"), [ReplicaRank()], 0)
    alone.arrive()
    alone.begin()
    alone.require(wait=True)
    assert told(findings) == []


@pytest.mark.parametrize(
    ("silent", "said"),
    [(1, "rank 1 has not said that it is guarded"), (0, "rank 0 has not said that it is guarded")],
)
def test_a_silent_rank_is_told_by_the_first_of_the_others(findings, silent, said):
    """Also where the silent one is rank 0. In raise mode it is raised, too."""
    one = RanksRollCall(CanaryConfig(mode="raise"), PAIR, 1 - silent, HashStore())
    one.say(GUARDED)
    call([one])
    (event,) = told(findings)
    assert (event.level, event.fields["ranks"], event.fields["workers"]) == ("error", [silent], 2)
    assert event.fields["reason"].startswith(said)
    assert "Install the same release of Canary on all machines" in event.fields["reason"]
    with pytest.raises(AttachError, match=said):
        one.require(wait=True)


def test_what_differs_is_told_once_for_all_ranks(findings):
    """Another setting, another release, a pool that is not guarded: the first rank tells all of it, and only it."""
    store = HashStore()
    places = [ReplicaRank(0, rank) for rank in range(4)]
    config = CanaryConfig(plugins=["sglang"])
    calls = [RanksRollCall(config.model_copy(update={"read_check": n % 2}), places, n, store) for n in range(3)]
    calls[0].say(GUARDED)
    calls[1].say(GUARDED)
    calls[2].say(None, "its pool is not guarded")
    store.set(roll_call._key(3), json.dumps({"version": "0.0.9", "enabled": True, "missing": ""}).encode())
    call(calls)
    (event,) = told(findings)
    assert event.fields["ranks"] == [1, 2, 3]
    for part in ("CANARY_READ_CHECK is '1', here '0'", "its pool is not guarded", "runs canary 0.0.9"):
        assert part in event.fields["reason"]
    calls[0].require(wait=True)


def test_replicas_of_one_world_are_told_apart(findings):
    """With data-parallel attention replicas are in one world: a replica of which no rank is there is told by another
    one's, with ranks as they count within it."""
    places = [ReplicaRank(0, 0), ReplicaRank(0, 1), ReplicaRank(1, 0), ReplicaRank(1, 1)]
    store = HashStore()
    calls = [RanksRollCall(CanaryConfig(), places, rank, store) for rank in (0, 1)]
    for one in calls:
        one.say(GUARDED)
    call(calls)
    (event,) = told(findings)
    assert (event.fields["replica"], event.fields["ranks"], event.fields["workers"]) == (1, [0, 1], 2)


def test_where_no_rank_is_guarded_each_has_told_why(findings):
    """A pool that Canary refuses on all ranks is in each rank's own coverage event."""
    store = HashStore()
    calls = [RanksRollCall(CanaryConfig(), PAIR, rank, store) for rank in (0, 1)]
    for one in calls:
        one.say(None, "not covered")
    call(calls)
    assert told(findings) == []


def together(calls, asking, *what):
    """Each asking rank's answer: all ask at once."""
    answers = {}
    threads = [threading.Thread(target=lambda n=n: answers.update({n: calls[n].together(*what)})) for n in asking]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@pytest.mark.parametrize(
    ("ways", "all_do"),
    [(("abort", "abort"), True), (("abort", "quarantine"), False), (("abort", None), False), ((None, "abort"), False),
     (("report", "abort"), False)],
)  # fmt: skip
def test_ranks_act_together_only_where_all_do(ways, all_do):
    """All of those that ask have the same answer. One that is not there, or does not act, would not take part in what
    they wait for."""
    store = HashStore()
    calls = {n: RanksRollCall(CanaryConfig(on_violation=way), PAIR, n, store) for n, way in enumerate(ways) if way}
    for one in calls.values():
        one.say(GUARDED)
    asking = [n for n in calls if ways[n] != "report"]
    assert together(calls, asking) == dict.fromkeys(asking, all_do)


@pytest.mark.parametrize(
    ("settings", "guarded", "all_do"),
    [
        (({"recompute": "5%"}, {"recompute": "5%"}), (True, True), True),
        (({"control": "write"}, {"control": "write"}), (True, True), True),
        (({"recompute": "5%"}, {"recompute": "5%"}), (True, False), False),
        (({"recompute": "5%"}, {"recompute": "6%"}), (True, True), False),
        (({"recompute": "5%", "control": "write"}, {"recompute": "5%"}), (True, True), False),
        (({}, {"recompute": "5%"}), (True, True), False),
    ],
)
def test_ranks_recompute_together_only_where_all_do(settings, guarded, all_do):
    """Those that don't, or are unguarded, do not ask."""
    store = HashStore()
    calls = [RanksRollCall(CanaryConfig(**given), PAIR, n, store) for n, given in enumerate(settings)]
    for call, is_guarded in zip(calls, guarded, strict=True):
        call.say(GUARDED if is_guarded else None)
    asking = [n for n in (0, 1) if settings[n] and guarded[n]]
    assert together(calls, asking, roll_call.RECOMPUTES) == dict.fromkeys(asking, all_do)


@pytest.mark.parametrize(
    ("attn_dp_size", "dp_rank", "places"),
    [
        (1, None, [(0, 0), (0, 1), (0, 2), (0, 3)]),
        (1, 3, [(3, 0), (3, 1), (3, 2), (3, 3)]),
        (2, 1, [(0, 0), (1, 0), (0, 1), (1, 1)]),
    ],
)
def test_a_process_knows_its_replica_and_its_rank_there(monkeypatch, attn_dp_size, dp_rank, places):
    """Two pipeline stages of two tensor-parallel ranks: one replica, one of several engines, or two replicas of
    data-parallel attention, of which each stage has a rank."""
    known = {"attn_dp_size": attn_dp_size, "tp_size": 2}
    monkeypatch.setattr(ranks, "_parallel", known.get)
    monkeypatch.setattr(ranks, "_world_size", lambda: 4)
    found = ranks.places(SimpleNamespace(dp_rank=dp_rank))
    assert [(place.replica, place.rank) for place in found] == places
