"""Requests decoded by speculation, computed again without it: what was accepted is well, and one wrong KV among drafts
is told, by the KV alone."""

from types import SimpleNamespace

import pytest
from canary_sglang.compat.schedulers import recompute_refusal
from engines.setups import SPECULATIVE
from tools.recompute_verdicts import clean, told
from tools.recomputes import OPTIONS, QUIET, prompt

TURNS = pytest.mark.takes_turns("requests computed again without speculation, and drafts without an engine")
WAYS = ("eagle", "eagle_tree", "eagle_layers", "eagle_pages", "standalone", "ngram")

pytestmark = [pytest.mark.timeout(1800), pytest.mark.xdist_group("recompute")]

ROOM = {key: OPTIONS[key] for key in ("max_total_tokens", "max_running_requests")}
PROVES = {**QUIET, "CANARY_RECOMPUTE": "100%"}


def traffic(count=24):
    """Lengths up to two chunks, and hits."""
    shared = prompt("speculated", 60)
    lengths = [35, 50, 40, 60]
    return [[*(shared[: 20 + 5 * (i % 8)] if i % 3 == 0 else []), *prompt(i, lengths[i % 4])] for i in range(count)]


def started(launch, name, **options):
    """An engine with room for internal requests."""
    setup = vars(SPECULATIVE[name])
    return launch({**setup, "options": {**setup["options"], **ROOM, **options}}, **PROVES)


@pytest.mark.where(TURNS, name="eagle")
@pytest.mark.where(pytest.mark.beyond_ci("EAGLE without branches"), name=[way for way in WAYS if way != "eagle"])
@pytest.mark.parametrize("name", WAYS)
def test_accepted_drafts_are_well_and_one_wrong_kv_is_told(launch, name):
    """Clean traffic with hits, rejected drafts, and paths of trees that are moved; then the KV of one rejected draft is
    kept, then one key of a verified token is wrong. Later tokens attend to either; the token alone is no verdict."""
    engine = started(launch, name)
    done = engine.recompute_traffic(prompts=traffic(), new_tokens=48)
    judged, same = clean(done)
    assert judged >= 20
    assert same >= 1
    assert done["cached"] > 50
    for fault, layer in (("kept_draft", 1), ("wrong_key", 2)):
        done = engine.recompute_broken(fault=fault, tokens=40)
        assert done["verdicts"] == ["differs", "same"], done["answers"]
        ((found, position, request, why),) = set(told(done))
        assert (found, request, why) == (layer, "ill", "attention")
        assert done["at"] <= position <= done["at"] + 8


@pytest.mark.where(TURNS, name="eagle")
@pytest.mark.where(pytest.mark.beyond_ci("keys of two tokens"), name="ngram")
@pytest.mark.parametrize("name", ["eagle", "ngram"])
def test_what_ended_requests_left_is_looked_up_under_their_keys(launch, name):
    """EAGLE's cache has each slot under its token and the next one, so the last slot is under no key."""
    engine = started(launch, name)
    engine.parked_teach()
    engine.parked_serve(lengths={"old": 60, "older": 50}, new_tokens=12)
    left = {name: tokens for name, tokens in engine.parked_left().items() if name in ("old", "older")}
    done = engine.parked_verify(names=["old", "older"])
    judged = [(one["verdict"], one["tokens"]) for one in done["answers"]]
    assert judged == [("same", tokens) for tokens in left.values()]
    # Of the last drafts some may have been accepted beyond the end.
    assert all(70 <= tokens + shorter < 76 for tokens, shorter in zip(left.values(), (0, 10), strict=True))
    engine.parked_scale(name="old", layer=1, positions=[*range(32, 64)], factor=1.01)
    done = engine.parked_verify(names=["old", "older"])
    assert [one["verdict"] for one in done["answers"]] == ["differs", "same"]
    assert {one[:3] for one in told(done)} == {(1, 32, "old")}


@pytest.mark.beyond_ci("the overlap scheduler without speculation, and speculation without it")
@pytest.mark.parametrize("name", ["eagle", "standalone", "ngram"])
def test_speculation_under_the_overlap_scheduler_is_well(launch, name):
    """Drafts are verified before it is known which of the last ones were accepted. Requests end sooner than without it,
    so more of them are asked."""
    engine = started(launch, name, disable_overlap_schedule=False)
    judged, same = clean(engine.recompute_overlapped(prompts=traffic(48), new_tokens=48))
    assert judged >= 20
    assert same >= 1


@pytest.mark.without_engine
def test_other_algorithms_are_refused_by_their_names():
    """Which KV they leave is not known."""
    algorithm = SimpleNamespace(name="DFLASH")
    scheduler = SimpleNamespace(server_args=SimpleNamespace(), tree_cache=None, spec_algorithm=algorithm)
    assert "speculation by DFLASH" in str(recompute_refusal(scheduler))
