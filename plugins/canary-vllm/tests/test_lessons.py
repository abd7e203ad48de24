"""Engines whose requests all have a prefix hit: the scheduler begins fresh ones of its own, to learn the noise."""

import pytest
from canary_vllm.hooks import HOOKS
from vllm_on_cpu import guarded, verified
from vllm_on_cpu.scripts import told_by

from canary_adapters import is_internal, lessons
from canary_core import Kind, Patches

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("process 0")]
QUIET = dict(read_check=0, scrub_budget="0", bytes="off")
"""All checks of bytes are off."""
HEAD = verified.prompt("head", 48)
"""All prompts begin so."""


@pytest.fixture(scope="module", params=[False, True], ids=["in step", "asynchronous"])
def small(request):
    """An engine in whose decodes layer 0 rounds otherwise than in a prefill, as on a GPU."""
    from vllm_on_cpu.engine import SmallEngine

    options = dict(load_format="auto", num_gpu_blocks_override=48, max_num_seqs=6, async_scheduling=request.param)
    engine = SmallEngine(verified.weighty(), **options)
    with verified.rounded_decodes(engine):
        yield engine


def serve(small, requests, new_tokens=60, at_once=3):
    """Answers by name: of one request that brings the prefix into the cache, and others, some at once at any time."""
    small.serve([HEAD], 1, "first")
    for number in range(requests):
        small.submit(str(number), HEAD + verified.prompt(f"tail {number}", 20 + 7 * (number % 3)), new_tokens)
        while number >= at_once - 1 and len(small.ends) <= number - at_once + 2 and small.step():
            pass
    verified.finish(small)
    return dict(small.answers)


def verdicts(session):
    """Of requests of users, and of lessons."""
    users = [one.verdict for one in session.recomputed.answers if not is_internal(one.request)]
    return users, [one.verdict for one in session.recomputed.answers if is_internal(one.request)]


def internal(small):
    """Names of internal requests that the scheduler has."""
    return [*filter(is_internal, small.scheduler.requests)]


def until(small, condition):
    """Steps the engine until ``condition`` holds."""
    while not condition():
        assert small.step(), "nothing runs any more"


def lesson_decodes(small):
    """A lesson runs beside ``long``, and has decoded a token."""
    small.serve([HEAD], 1, "first")
    small.submit("long", HEAD + verified.prompt("long", 20), 120)
    until(small, lambda: len(small.answers["long"]) > 2)
    HOOKS.sessions[0].recomputed.ask("long")
    until(small, lambda: any(small.scheduler.requests[one].num_output_tokens for one in internal(small)))
    (name,) = internal(small)
    return name


@pytest.mark.parametrize("taught", [False, True])
def test_engines_without_a_fresh_request_learn_from_their_own(taught, small, monkeypatch):
    """Verdicts are the same once the noise is known, and no answer is another; without lessons there is none."""
    if not taught:
        monkeypatch.setattr(lessons.Lessons, "want", lambda _: None)
    small.renew()
    plain = serve(small, 40)
    with guarded.guard(small, recompute="100%", bytes="all") as guard:
        assert serve(small, 40) == plain
        users, own = verdicts(HOOKS.sessions[0])
        stats = guard.canary.stats()
        assert len(users) > 20
        if not taught:
            assert {*users} == {"unjudged"}
            assert (own, "recompute_lessons" in stats) == ([], False)
            return
        assert users[:1] == ["unjudged"]
        assert {*users[1:]} == {"same"}
        assert len(own) == stats["recompute_lessons"] == stats["recompute_taught"] == lessons.AT_ONCE
        assert guard.findings.violations == []


def test_nothing_of_a_lesson_is_seen(small):
    """No client, no statistic of the prefix cache and no block of it: only rows in batches."""
    small.renew()
    with guarded.guard(small, **QUIET, recompute="100%"):
        given, cached, kept = [], [], small.pool.cached_block_hash_to_block
        watch = Patches()
        watch.follow(small.scheduler, "update_from_output", lambda made, *_: given.extend(made.values()))
        watch.follow(small.pool, "cache_full_blocks", lambda _, request, *__, **___: cached.append(request.request_id))
        serve(small, 20)
        assert verdicts(HOOKS.sessions[0])[1]
        ended = {output.request_id for one in given for output in one.outputs}
        ended |= {name for one in given for name in one.finished_requests or ()}
        assert not [*filter(is_internal, [*ended, *cached])]
        assert internal(small) == []
        assert len(kept) > 0
        assert small.pool.get_num_free_blocks() == len(small.pool.blocks) - 1


def test_whoever_asks_has_the_engine_learn(small):
    """Without a share: a while after the first ask for a request with a hit there are verdicts."""
    with guarded.guard(small, **QUIET) as guard:
        small.serve([HEAD], 1, "first")
        known = []
        for number in range(8):
            verified.begin(small, 2, {f"ask {number}": HEAD + verified.prompt(f"ask {number}", 30)})
            known += verified.verify(small, f"ask {number}")
            verified.finish(small)
        assert (known[0].verdict, known[-1].verdict) == ("unjudged", "same")
        assert guard.canary.stats()["recompute_taught"] >= lessons.AT_ONCE
        assert guard.findings.violations == []


def test_weights_that_changed_under_a_kept_cache_are_told_where_all_requests_have_a_hit(small):
    """The bound is that of the engine's noise."""
    name = "model.layers.0.post_attention_layernorm.weight"
    with guarded.guard(small, **QUIET, recompute="100%") as guard:
        serve(small, 20)
        assert guard.findings.violations == []
        with verified.scaled(small, name, 1.05):
            small.submit("hits", HEAD + verified.prompt("hits"), 60)
            verified.finish(small)
        guard.canary.drain()
        (found,) = guard.findings.violations
        assert (found.kind, found.layer, found.position, found.request) == (Kind.RECOMPUTE, 1, 0, "hits")
        assert found.rule == "brought"


def test_a_lesson_ends_once_a_batch_leaves_a_user_waiting(small):
    """All seats are asked for: it is gone after the batch, and another one begins once nobody waits."""
    with guarded.guard(small, **QUIET) as guard:
        name = lesson_decodes(small)
        for number in range(small.scheduler.max_num_running_reqs):
            small.submit(f"more {number}", HEAD + verified.prompt(number, 20), 40)
        assert small.step()
        assert internal(small) == []
        until(small, lambda: internal(small))
        assert internal(small) != [name]
        assert not small.scheduler.waiting
        verified.finish(small)
        assert guard.canary.stats()["recompute_lessons_ended"] >= 1


def test_a_lesson_is_preempted_before_any_user_and_ends(small):
    """Where the pool is full."""
    with guarded.guard(small, **QUIET):
        name, preempted = lesson_decodes(small), []
        Patches().follow(
            small.scheduler, "_preempt_request", lambda _, request, *__, **___: preempted.append(request.request_id)
        )
        taken = small.pool.get_new_blocks(small.pool.get_num_free_blocks())
        until(small, lambda: preempted or not small.scheduler.requests)
        small.pool.free_blocks(taken)
        assert (preempted, internal(small)) == ([name], [])
        verified.finish(small)
        assert len(small.answers["long"]) == 120


def test_a_lesson_ends_with_the_last_request_of_a_user(small):
    """Nothing is left to run, and no block is held."""
    with guarded.guard(small, **QUIET):
        lesson_decodes(small)
        small.core.abort_requests(["long"])
        small.step()
        assert small.scheduler.requests == {}
        assert small.scheduler.reset_prefix_cache()


def test_requests_near_the_longest_length_are_no_lessons_which_is_counted(small, monkeypatch):
    """Their tokens and an answer don't fit."""
    monkeypatch.setattr(lessons, "LESSON_TOKENS", small.scheduler.max_model_len - len(HEAD))
    with guarded.guard(small, **QUIET, recompute="100%") as guard:
        serve(small, 10)
        stats = guard.canary.stats()
        assert {"recompute_lessons", "recompute_taught"}.isdisjoint(stats)
        assert stats["recompute_no_lesson"] > 1
        assert "unjudged" in verdicts(HOOKS.sessions[0])[0]


@pytest.mark.parametrize("how", ["v2", "eagle"])
def test_other_engines_learn_so_too(how):
    """With the V2 runner, and where the lesson drafts as the users do: answers stay the same, and nothing is found."""
    told = told_by("lessons_script", how)
    (stats,) = told["stats"]
    assert told["same"]
    assert stats["violations"] == 0
    assert stats["recompute_taught"] >= 2
    assert 2 <= stats["recompute_lessons"] <= lessons.AT_ONCE


def test_two_ranks_learn_so_too():
    """Each compares its own shard of the same lessons."""
    plain = told_by("lessons_script", "ranks")
    told = told_by("lessons_script", "ranks", plugins="vllm", CANARY_RECOMPUTE="100%")
    assert told["answers"] == plain["answers"]
    for stats in told["stats"]:
        assert stats["violations"] == 0
        assert stats["recompute_taught"] >= 2
        assert stats["recompute_lessons"] >= 2
