"""``CANARY_ON_VIOLATION``: what is corrupted is not served, on real SGLang; several ranks decide alike."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from canary_sglang.actions.ranks import Ranks, Stages
from canary_sglang.actions.suspect import Suspect
from packaging.version import Version

from canary_adapters import default_store
from canary_core.records import Kind, Phase, State
from canary_core.violation import Violation

pytestmark = pytest.mark.timeout(900)

FOUND = dict(region="full", step=9, slot=4, page=4, request="r", stored_request="w", step_written=3)


@pytest.mark.where(pytest.mark.beyond_ci("the same with MHA, and single nodes of a window's cache"), name="swa")
@pytest.mark.parametrize(("name", "region", "source"), [("mha", "full", "v.1"), ("swa", "full", "k.1")])
def test_a_corrupted_prefix_is_evicted_and_computed_again(start, name, region, source):
    """A bit flips in an idle node of the prefix cache. It is found, the node is evicted, and the same prompt gives what
    it gave before, without a finding."""
    engine = start(name, CANARY_ON_VIOLATION="quarantine")
    prompt = engine.setup.traffic(0)[0]
    before = engine.rot(prompt=prompt, region=region, source=source)
    engine.scrub(prompt=[9, 8, 7])
    (found,) = engine.findings()["violations"]
    assert (found["kind"], found["slot"]) == ("bytes", before["slot"])
    engine.serve(prompts=[[5, 6, 7]], new_tokens=8)
    told = [event for event in engine.events() if event["name"] in ("quarantined", "aborted", "quarantine_failed")]
    assert [event["name"] for event in told] == ["quarantined"]
    assert (told[0]["region"], told[0]["slot"]) == (region, before["slot"])
    after = engine.serve(prompts=[prompt], new_tokens=4)
    assert after["outputs"] == before["outputs"]
    assert after["cached"][0] < len(prompt) - 1
    engine.scrub(prompt=[9, 8, 7])
    assert engine.findings()["violations"] == []
    again = engine.serve(prompts=[prompt], new_tokens=4)
    assert again["outputs"] == before["outputs"]
    assert again["cached"][0] == len(prompt) - 1


@pytest.mark.where(pytest.mark.beyond_ci("each core, and each cache, once"), core="python", name="mha")
@pytest.mark.where(pytest.mark.beyond_ci("each core, and each cache, once"), core="rust", name="swa")
@pytest.mark.takes_turns("the whole of an idle node, evicted and computed again")
@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize(("name", "source"), [("mha", "v.1"), ("swa", "k.1")])
def test_only_the_corrupted_node_is_evicted_and_what_follows_it(start, core, name, source):
    """Two prompts share a beginning, one of them is the beginning of a third, and a fourth has nothing to do with them.
    A bit flips where the first one goes its own way: it and the third are computed again from there, all else stays
    cached."""
    if core == "rust" and Version(version("sglang")) < Version("0.5.21"):
        pytest.skip("this SGLang has the core in Python only")
    engine = start(name, CANARY_ON_VIOLATION="quarantine", SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=core)
    r = random.Random(0)
    begin, own, next_, other, last = ([r.randrange(3, 250) for _ in range(20)] for _ in range(5))
    long, beside, apart = begin + own + next_, begin + other, last + last
    served = [engine.serve(prompts=[prompt], new_tokens=4) for prompt in (apart, beside, long) * 2]
    slot = engine.rot(prompt=begin + own, region="full", source=source)["slot"]
    engine.scrub(prompt=[9, 8, 7])
    (found,) = engine.findings()["violations"]
    assert found["slot"] == slot
    engine.serve(prompts=[[5, 6, 7]], new_tokens=8)
    (told,) = [event for event in engine.events() if event["name"] in ("quarantined", "aborted", "quarantine_failed")]
    assert told["name"] == "quarantined"
    assert told["host"]
    assert told["replica"] == 0
    # Both ways on from there, with what was computed for each.
    assert 40 < told["evicted_tokens"] <= 20 + 24 + 4
    again = [engine.serve(prompts=[prompt], new_tokens=4) for prompt in (apart, beside, long)]
    assert [done["cached"][0] for done in again] == [*(done["cached"][0] for done in served[3:5]), 20]
    assert [done["outputs"] for done in again] == [done["outputs"] for done in served[:3]]
    engine.scrub(prompt=[9, 8, 7])
    assert engine.findings()["violations"] == []


@pytest.mark.takes_turns("a corrupted prefix, evicted")
def test_a_corrupted_ring_row_of_a_cached_page_is_evicted_with_it(start):
    """A bit flips in what DeepSeek-V4's compressor keeps of a cached page's last tokens. Whoever continues that prefix
    reads it, and is aborted; the page is evicted but not the one before it, and the same prompt gives what it gave."""
    engine = start("deepseek_v4", CANARY_ON_VIOLATION="quarantine")
    prompt = engine.setup.traffic(0)[0][:516]
    before = engine.rot(prompt=prompt, region="c4_state", source="index_score.2")
    engine.serve(prompts=[prompt], new_tokens=40)
    engine.serve(prompts=[[5, 6, 7]], new_tokens=8)
    (found,) = engine.findings()["violations"]
    assert (found["kind"], found["phase"], found["slot"]) == ("bytes", "pre_forward", before["slot"])
    told = [event["name"] for event in engine.events() if event["name"] in ("quarantined", "aborted")]
    assert told == ["aborted", "quarantined"]
    after = engine.serve(prompts=[prompt], new_tokens=4)
    assert (after["outputs"], after["cached"]) == (before["outputs"], [256])
    again = engine.serve(prompts=[prompt], new_tokens=4)
    assert (again["outputs"], again["cached"]) == (before["outputs"], [512])
    assert engine.findings()["violations"] == []


@pytest.mark.beyond_ci("quarantine of prefixes and requests without recurrent states")
@pytest.mark.parametrize("name", ["short_conv"])
def test_a_corrupted_cached_state_is_evicted_and_computed_again(start, name):
    """A bit flips in a recurrent state that the prefix cache holds and nobody uses. It is found, its node leaves the
    cache, and the same prompt gives what it gave before."""
    engine = start(name, CANARY_ON_VIOLATION="quarantine")
    prompt = engine.setup.traffic(0)[0]
    before = engine.serve(prompts=[prompt], new_tokens=4)
    (slot,) = [state["slot"] for state in engine.cached_states() if state["bytes"]][-1:]
    engine.flip(region="mamba", source=engine.regions()["mamba"]["sources"][-1], seed=1, among=[slot])
    engine.scrub(prompt=[9, 8, 7])
    (found,) = engine.findings()["violations"]
    assert (found["kind"], found["region"], found["slot"]) == ("bytes", "mamba", slot)
    engine.serve(prompts=[[5, 6, 7]], new_tokens=8)
    (told,) = [event for event in engine.events() if event["name"] in ("quarantined", "aborted", "quarantine_failed")]
    assert (told["name"], told["region"], told["slot"]) == ("quarantined", "mamba", slot)
    assert told["evicted_tokens"] > 0
    again = engine.serve(prompts=[prompt], new_tokens=4)
    assert again["outputs"] == before["outputs"]
    engine.scrub(prompt=[9, 8, 7])
    assert engine.findings()["violations"] == []
    assert engine.ownership()["mamba"]["differences"] == []


@pytest.mark.beyond_ci("quarantine of prefixes and requests without recurrent states")
@pytest.mark.parametrize("name", ["short_conv"])
@pytest.mark.parametrize("mode", ["abort", "quarantine"])
def test_a_request_whose_state_is_corrupted_is_aborted(start, name, mode):
    """A bit flips in the recurrent state of a request that is decoding: it ends with status 503, another goes on."""
    engine = start(name, CANARY_ON_VIOLATION=mode)
    prompts = [engine.setup.traffic(0)[0], engine.setup.traffic(1)[0]]
    clean = engine.serve(prompts=prompts, new_tokens=30, together=2)["outputs"]
    engine.flush()
    done = engine.rot_running_state(prompts=prompts, source=engine.regions()["mamba"]["sources"][0])
    assert {(v["kind"], v["slot"]) for v in engine.findings()["violations"]} == {("bytes", done["slot"])}
    good, bad = done["reasons"]
    assert good["type"] == "length"
    assert (bad["type"], bad["status_code"]) == ("abort", 503)
    assert done["outputs"][0] == clean[0]


@pytest.mark.where(pytest.mark.takes_turns("the same with quarantine, which aborts, too"), mode="abort")
@pytest.mark.parametrize("mode", ["abort", "quarantine"])
def test_a_corrupted_request_is_aborted_as_retryable(start, mode):
    """A bit flips in what a running request has written. It ends with status 503; the other goes on to its end, and the
    same prompts, served again, give what an engine without a fault gives."""
    engine = start("mha", CANARY_ON_VIOLATION=mode)
    prompts = [engine.setup.traffic(0)[0], engine.setup.traffic(1)[0]]
    clean = engine.serve(prompts=prompts, new_tokens=30, together=2)["outputs"]
    engine.flush()
    done = engine.rot_running(prompts=prompts, region="full", source="k.2")
    (found,) = engine.findings()["violations"]
    assert found["slot"] == done["slot"]
    good, bad = done["reasons"]
    assert good["type"] == "length"
    assert (bad["type"], bad["status_code"]) == ("abort", 503)
    assert done["outputs"][0] == clean[0]
    assert len(done["outputs"][1]) < 30
    aborted = [event for event in engine.events() if event["name"] == "aborted"]
    assert [(event["request"], event["slot"]) for event in aborted] == [(done["requests"][1], done["slot"])]
    if mode == "quarantine":
        engine.serve(prompts=[[5, 6, 7]], new_tokens=8)
        assert engine.serve(prompts=prompts, new_tokens=30, together=2)["outputs"] == clean
    assert engine.findings()["violations"] == []


@pytest.mark.takes_turns("findings of engines with default settings, whose requests end as ever")
def test_nothing_is_done_by_default(start):
    """``report`` tells of it, and no more: the request ends as it would have."""
    engine = start("mha")
    prompts = [engine.setup.traffic(0)[0]]
    done = engine.rot_running(prompts=prompts, region="full", source="k.2")
    assert [v["slot"] for v in engine.findings()["violations"]] == [done["slot"]]
    assert done["reasons"][0]["type"] == "length"


@pytest.mark.without_engine
@pytest.mark.parametrize(
    ("kind", "phase", "slot", "spoiled", "written", "requests"),
    [
        pytest.param(Kind.BYTES, Phase.SCRUB, 4, True, 3, ("r",), id="changed bytes"),
        pytest.param(Kind.LOST_WRITE, Phase.POST_FORWARD, 4, True, 9, ("r",), id="lost write"),
        pytest.param(Kind.TOKEN, Phase.PRE_FORWARD, 4, False, -1, ("r",), id="wrong slot in a table"),
        pytest.param(Kind.DOUBLE_ALLOC, Phase.EVENT, -1, False, -1, ("r", "w"), id="slot of two"),
    ],
)
def test_what_a_finding_leads_to(kind, phase, slot, spoiled, written, requests):
    """Bytes that changed concern a slot for everybody; a wrong slot of a table, only its reader; a slot that was handed
    out twice, both who have it."""
    suspect = Suspect.of(Violation(kind=kind, phase=phase, **FOUND))
    assert (suspect.slot, suspect.spoiled, suspect.written, suspect.requests) == (slot, spoiled, written, requests)


@pytest.mark.without_engine
def test_who_wrote_a_slot_before_it_was_handed_out_twice_is_left_alone():
    """Nobody has written it since it was handed out: its record names somebody who gave it back."""
    found = Violation(kind=Kind.DOUBLE_ALLOC, phase=Phase.EVENT, stored_state=State.ALLOCATED, **FOUND)
    assert Suspect.of(found).requests == ("r",)


@pytest.mark.without_engine
def test_a_double_free_leads_to_nothing():
    """There is nobody whom one could stop."""
    assert Suspect.of(Violation(kind=Kind.DOUBLE_FREE, phase=Phase.EVENT, **FOUND)) is None


def suspect(slot: int, rank: int) -> Suspect:
    """Found by one rank."""
    return Suspect("full", slot, True, 1, "bytes", (f"r{rank}",))


@contextmanager
def told_by(rank: int, address: str, answers: "torch.multiprocessing.Queue") -> Iterator[list[Any]]:
    """One of two processes: what it puts in the list is its answer."""
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    told: list[Any] = []
    yield told
    answers.put((rank, told))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def talk(rank: int, address: str, answers: "torch.multiprocessing.Queue") -> None:
    """One of two ranks: what they know of each other."""
    with told_by(rank, address, answers) as told:
        ranks = Ranks(torch.distributed.group.WORLD)
        told += [ranks.alike("same"), ranks.alike(rank), ranks.anybody_had()]
        for has in (False, rank == 1):
            ranks.ask(has)
            # The engine's own talk goes on meanwhile.
            torch.distributed.all_reduce(torch.zeros(1))
            told.append(ranks.anybody_had())
        told.append(ranks.union([suspect(7, rank)] if rank else []))
        told.append(ranks.end_round(list))
        for has in (False, rank == 1):
            ranks.begin_round(has, list)
            told.append(ranks.end_round(lambda: [(suspect(3, rank), True), (suspect(7, 1), False)]))
        told.append(ranks.end_round(list))


@pytest.mark.without_engine
def test_all_ranks_decide_alike(tmp_path):
    """What one of them found, all act on, in one order; what one of them says is gone, is gone for all."""
    told = two(talk, tmp_path)
    assert told[0] == told[1]
    assert told[0] == [
        *(True, False, False),
        *(False, True),
        [suspect(7, 1)],
        *([], None),
        [(suspect(3, 0), True), (suspect(3, 1), True), (suspect(7, 1), False)],
        None,
    ]


def talk_in_turns(rank: int, address: str, answers: "torch.multiprocessing.Queue") -> None:
    """One of two stages of a pipeline: the first begins a round before the one before has ended."""
    with told_by(rank, address, answers) as told:
        stages = Stages(torch.distributed.group.WORLD, default_store())
        for number in range(4):
            stages.begin_round(number in (rank, 3), partial(list, [suspect(number, rank), suspect(9, 5)]))
            if number or rank:
                told.append(stages.end_round(list))
        if not rank:
            told.append(stages.end_round(list))
        told.append(stages.end_round(list))


@pytest.mark.without_engine
def test_stages_of_a_pipeline_decide_alike(tmp_path):
    """Rounds end in the order of their beginnings, with what there was at the beginning, though one stage is a round
    ahead."""
    told = two(talk_in_turns, tmp_path)
    assert told[0] == told[1]
    assert told[0] == [
        [suspect(0, 0), suspect(9, 5)],
        [suspect(1, 1), suspect(9, 5)],
        None,
        [suspect(3, 0), suspect(3, 1), suspect(9, 5)],
        None,
    ]


def two(talk: Callable[..., None], folder: Path) -> dict[int, list[Any]]:
    """The answers of two processes of one group, each of which runs ``talk``."""
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    address = f"file://{folder}/store"
    processes = [context.Process(target=talk, args=(rank, address, answers)) for rank in range(2)]
    for process in processes:
        process.start()
    told = dict(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(60)
    return told


@pytest.mark.without_engine
def test_a_lone_rank_asks_nobody():
    """Without a group it acts on its own findings, each once."""
    assert Ranks(None).alike("anything")
    assert Ranks(None).union([suspect(2, 0), suspect(1, 0), suspect(2, 0)]) == [suspect(1, 0), suspect(2, 0)]
