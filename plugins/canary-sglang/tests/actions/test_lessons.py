"""Engines whose requests all have a prefix hit: SGLang's scheduler begins fresh ones of its own, to learn the noise."""

import pytest
from tools.recompute_verdicts import ALL, clean, told
from tools.recomputes import ASKED, OPTIONS, prompt

from canary_adapters import is_internal
from canary_adapters.lessons import AT_ONCE

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("recompute")]
HEAD = prompt("head", 48)
"""All prompts begin so."""
REQUESTS = [[*HEAD, *prompt(f"tail {n}", 20 + 7 * (n % 3))] for n in range(48)]
NEW = 60


def traffic(engine, overlap):
    """Served once the prefix is in the cache."""
    engine.serve(prompts=[HEAD], new_tokens=1)
    serve = engine.recompute_overlapped if overlap else engine.recompute_traffic
    return serve(prompts=REQUESTS, new_tokens=NEW)


@pytest.mark.parametrize("overlap", [False, True])
def test_engines_without_a_fresh_request_learn_from_their_own(launch, overlap):
    """Verdicts are the same once the noise is known, no answer is another, and nothing of a lesson is left, streamed or
    in the prefix cache."""
    options = {**OPTIONS, "disable_overlap_schedule": not overlap}
    plain = launch({"options": options}, CANARY_MODE="off").serve(prompts=REQUESTS, new_tokens=NEW)
    done = traffic(launch({"options": options}, **ALL), overlap)
    clean(done)
    users = [one["verdict"] for one in done["answers"] if not is_internal(one["request"])]
    # Until then users' requests and lessons take turns, and what is equal bit for bit has a verdict anyway.
    assert {*users[-len(users) // 2 :]} == {"same"}
    assert users.count("unjudged") < len(users) // 3
    assert done["stats"]["recompute_lessons"] >= done["stats"]["recompute_taught"] >= AT_ONCE
    assert done["outputs"] == plain["outputs"]


@pytest.mark.parametrize("how", ["crowd", "full", "abort"])
def test_a_lesson_gives_way(launch, how):
    """It ends after a batch that left users waiting, before anything is retracted for want of room, and with the last
    request of a user; where users go on another one begins. Nothing is left of it."""
    done = launch({"options": OPTIONS}, **ASKED).lesson_pressed(how=how)
    assert done["there"][-1] is False
    assert done["again"] == (how != "abort")
    assert done["retracted"] == 0
    assert done["asked"] == "unjudged"
    assert done["violations"] == []
    assert done["stats"]["recompute_lessons_ended"] >= 1
    assert (done["on"], done["leaked"]) == (True, False)
    assert not [name for name in (*done["names"], *done["inserted"]) if is_internal(name)]


def test_weights_that_changed_under_a_kept_cache_are_told_where_all_requests_have_a_hit(launch):
    """The bound is that of the engine's noise."""
    done = launch({"options": OPTIONS}, **ALL).lesson_learnt()
    assert done["before"] == []
    assert done["verdict"] == "differs"
    # What ended requests left may be found, too, by the idle engine.
    assert (1, 0, "ill", "brought") in told(done)
