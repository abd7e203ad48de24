"""Ranks that must compute the same: three of a toy engine, of which one does not."""

import os
import socket

import pytest
from support.toy_ranks import FORWARDS, Fault, serve, serve_apart

from canary_core.watchers.ranks import watch


def test_ranks_that_compute_the_same_are_silent_and_compared(tmp_path):
    """Every forward is compared by the lowest rank, with sampled tokens and the KV that all hold; that all have come is
    told once; the file is taken away then; and what the engine computes is what it computes without."""
    told = serve(tmp_path)
    assert [one.findings for one in told] == [[], [], []]
    assert [one["ranks"] for one in told[0].event("ranks_compared")] == [[0, 1, 2]]
    assert [name for one in told for name, _ in one.events if name in ("ranks_blind", "ranks_rounding")] == []
    written = [one.stats["ranks_written"] for one in told]
    assert min(written) >= FORWARDS - 1
    for count in ("ranks_compared", "ranks_compared_samples", "ranks_compared_kv"):
        assert told[0].stats[count] >= FORWARDS - 2, count
    assert not {"ranks_compared", "ranks_missed", "ranks_unsure"} & told[1].stats.keys()
    assert list(tmp_path.glob("ranks-*")) == []
    off = serve(tmp_path, ranks_interval=0)
    assert [one.pool for one in off] == [one.pool for one in told]
    assert not [name for name in off[0].stats if name.startswith("ranks_")]


@pytest.mark.parametrize("what", ["lengths", "tokens", "slots", "sampled", "kv"])
def test_a_rank_alone_is_named(tmp_path, what):
    """One finding, by the lowest rank, of the very forward: what differs, and where the rank runs. What follows from it
    is no other finding."""
    told = serve(tmp_path, fault=Fault(what))
    (found,) = told[0].of("ranks")
    assert (found["rule"], found["odd_rank"], found["step"], found["found_value"]) == (what, 2, 24, 24)
    assert f"rank 2 (host {socket.gethostname()}, process {os.getpid()}) alone differs from" in found["explanation"]
    assert told[1].of("ranks") == told[2].of("ranks") == []
    if what == "kv":
        assert (found["source"], found["layer"], found["half"]) == ("v.1", 1, "v")


def test_what_a_rank_computed_between_two_comparisons_is_found_at_the_next(tmp_path):
    """Every fifth forward is compared, and rank 2 is given another token in one between."""
    told = serve(tmp_path, fault=Fault("tokens", at=22, until=23), ranks_interval=5)
    (found,) = told[0].of("ranks")
    assert (found["rule"], found["odd_rank"], found["step"]) == ("history", 2, 25)


def test_of_two_ranks_nobody_can_say_which_is_wrong(tmp_path):
    """They differ, and none is named as the odd one."""
    told = serve(tmp_path, size=2, fault=Fault("sampled", rank=1))
    (found,) = told[0].of("ranks")
    assert found["rule"] == "sampled"
    assert "odd_rank" not in found
    assert "Which of them is right can't be told" in found["explanation"]


def test_ranks_in_processes_of_their_own_meet(tmp_path):
    """As those of an engine, which one process begins: their fingerprints have the same keys, which are drawn. Rank 2
    alone differs, and nothing is left on the disk."""
    told = serve_apart(tmp_path, 3, Fault("kv"))
    assert told[0].stats["ranks_compared_kv"] >= FORWARDS - 2
    assert [event["keys"] for one in told for event in one.event("attached")] == ["seeded"] * 3
    (found,) = told[0].of("ranks")
    assert (found["rule"], found["odd_rank"], found["step"], found["source"]) == ("kv", 2, 24, "v.1")
    assert [one.findings for one in told[1:]] == [[], []]
    assert list(tmp_path.glob("ranks-*")) == []


def test_kv_of_ranks_with_keys_of_their_own_is_not_compared_and_that_is_told(tmp_path):
    """Processes that were started one by one draw the keys of their fingerprints: the same bytes have others there. All
    else is compared, and with public keys KV is, too."""
    told = serve_apart(tmp_path, 2, Fault("sampled", rank=1), alone=True)
    assert [found["rule"] for found in told[0].of("ranks")] == ["sampled"]
    (blind,) = told[0].event("ranks_blind")
    assert "CANARY_KEY_FILE" in blind["reason"]
    assert told[0].event("ranks_rounding") == []
    assert "ranks_compared_kv" not in told[0].stats
    public = serve_apart(tmp_path, 2, Fault(), alone=True, keys="public")
    assert public[0].event("ranks_blind") == public[0].findings == []
    assert public[0].stats["ranks_compared_kv"] >= FORWARDS - 2


def test_a_rank_that_never_comes_is_told(tmp_path):
    """The others are compared all the same; there is no finding."""
    told = serve(tmp_path, fault=Fault("never comes"))
    assert [one.findings for one in told] == [[], [], []]
    (blind,) = told[0].event("ranks_blind")
    assert blind["ranks"] == [2]
    assert told[0].stats["ranks_compared"] >= FORWARDS - 2
    assert list(tmp_path.glob("ranks-*")) == []


def test_a_rank_that_stops_is_told(tmp_path):
    """It wrote some forwards, and no more: nobody waits for it, each missing row is counted, and the rest is compared;
    there is no finding."""
    told = serve(tmp_path, fault=Fault("dead", at=12, until=1000))
    assert [one.findings for one in told] == [[], [], []]
    (blind,) = told[0].event("ranks_blind")
    assert blind["ranks"] == [2]
    assert told[0].stats["ranks_missed"] >= watch.BLIND
    assert told[0].stats["ranks_compared"] >= FORWARDS - 2 - watch.PATIENCE


@pytest.mark.parametrize("what", ["paused", "not alike"])
def test_forwards_that_one_rank_leaves_out_are_not_compared_there(tmp_path, what):
    """A rank whose Canary is paused, or that can't be sure, for some forwards: they are numbered on, so that later ones
    are compared with the right ones."""
    told = serve(tmp_path, fault=Fault(what, at=20, until=25))
    assert [one.findings for one in told] == [[], [], []]
    assert told[0].stats["ranks_missed"] == 5
    assert told[0].stats["ranks_compared"] >= FORWARDS - 2


@pytest.mark.parametrize(("at", "until"), [(1, 1000), (1, 5)])
def test_kv_that_is_not_bit_equal_from_the_start_is_not_compared(tmp_path, at, until):
    """Kernels of one rank round in another way, always or in its first forwards: told once as what it is, no finding;
    all else is compared."""
    told = serve(tmp_path, fault=Fault("rounding", at=at, until=until))
    assert [one.findings for one in told] == [[], [], []]
    assert len(told[0].event("ranks_rounding")) == 1
    assert told[0].stats["ranks_unsure"] == 2  # once for the length of the prompts, once for that of decodes
    assert told[0].stats["ranks_compared"] >= FORWARDS - 2


def test_kv_that_was_bit_equal_before_is_compared_in_all_layers(tmp_path):
    """As after a sum over ranks of which one got another result: all layers differ."""
    told = serve(tmp_path, fault=Fault("rounding"))
    (found,) = told[0].of("ranks")
    assert (found["rule"], found["odd_rank"]) == ("kv", 2)
    assert "k.0, v.0, k.1 and v.1" in found["explanation"]


def test_kv_of_shards_is_not_compared(tmp_path):
    """With as many KV heads as ranks each has its own."""
    told = serve(tmp_path, fault=Fault("kv"), heads=3)
    assert [one.of("ranks") for one in told] == [[], [], []]
    assert "ranks_compared_kv" not in told[0].stats


def test_slots_of_ranks_with_allocators_of_their_own_are_not_compared(tmp_path):
    """They may be others in each rank."""
    told = serve(tmp_path, fault=Fault("slots"), slots=False)
    assert [one.of("ranks") for one in told] == [[], [], []]
    assert told[0].stats["ranks_compared"] >= FORWARDS - 2


def test_other_intervals_do_not_meet(tmp_path):
    """Each rank says that the others have not come."""
    told = serve(tmp_path, size=2, odd={"ranks_interval": 2})
    assert [one.findings for one in told] == [[], []]
    assert [[event["ranks"] for event in one.event("ranks_blind")] for one in told] == [[[1]], [[0]]]


def test_a_folder_of_somebody_else_is_told(tmp_path):
    """Whoever may write there could say anything: no rank takes part."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    told = serve(folder, size=2, control="off")
    assert [one.findings for one in told] == [[], []]
    assert ["somebody else may write" in event["reason"] for one in told for event in one.event("ranks_blind")] == [
        True,
        True,
    ]


def test_kernels_and_their_reference_give_the_same_sums(tmp_path):
    """A rank with the kernels and one with torch agree in everything."""
    told = serve(tmp_path, size=2, odd={"backend": "triton"})
    assert [one.findings for one in told] == [[], []]
    assert told[0].stats["ranks_compared_kv"] >= FORWARDS - 2
    assert "ranks_differing" not in told[0].stats
