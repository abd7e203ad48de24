"""Prefixes that ended requests left in vLLM's prefix cache, computed again: wrong ones are told, clean ones and those
whose blocks are used again never are, and the prefix cache stays what it was."""

import random

import pytest
from canary_vllm.hooks import HOOKS
from vllm_on_cpu import guarded, parked, verified
from vllm_on_cpu.engine import BLOCK

from canary_core import Kind

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("process 0")]
QUIET = dict(read_check=0, scrub_budget="0", bytes="off", control="write")
"""All checks of bytes are off. What ended requests leave is remembered only where somebody may ask for it."""
WEIGHT = "model.layers.0.post_attention_layernorm.weight"


IN_STEP = pytest.mark.takes_turns("the same with asynchronous scheduling", unit="parked in step")


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, id="in step", marks=IN_STEP), pytest.param(True, id="asynchronous")],
)
def small(request):
    """An engine with weights that matter, in float32: equal bit for bit, whatever the batch."""
    from vllm_on_cpu.engine import SmallEngine

    options = dict(load_format="auto", num_gpu_blocks_override=48, max_num_seqs=12)
    return SmallEngine(verified.weighty(), **options, async_scheduling=request.param)


def told(guard):
    """Layer, position, request and rule of each finding."""
    guard.canary.drain()
    assert {v.kind for v in guard.findings.violations} <= {Kind.RECOMPUTE}, guard.findings.violations
    return [(v.layer, v.position, v.request, v.rule) for v in guard.findings.violations]


def test_weights_that_changed_under_a_kept_cache_are_told_without_a_hit(small):
    """Of a prefix of the old weights, however it came there; one of the new weights is well."""
    prompt = verified.prompt("weights", 100)
    with guarded.guard(small, **QUIET) as guard:
        verified.teach(small)
        parked.serve(small, "before", prompt)
        parked.serve(small, "hit", [*prompt[:64], *verified.prompt("else")])
        (answer,) = parked.verify(small, "before")
        assert (answer.verdict, answer.tokens, answer.parked) == ("same", 96, True)
        with verified.scaled(small, WEIGHT, 1.05):
            parked.serve(small, "after", verified.prompt("after", 100))
            answers = parked.verify(small, "before", "hit", "after")
        assert [one.verdict for one in answers] == ["differs", "differs", "same"]
        assert told(guard) == [(1, 0, "before", "everywhere"), (1, 0, "hit", "brought")]
        assert "it has ended, and the prefix cache keeps 96 tokens of it" in guard.findings.violations[0].detail
        assert answers[0].table().startswith("prefix of before: differs, 96 tokens")


def test_nothing_is_remembered_where_nobody_can_ask(small):
    """By default: each block of a request that ends would cost the host time. A verification says so."""
    with guarded.guard(small, **{**QUIET, "control": "read"}):
        blocks = parked.serve(small, "ended", verified.prompt("ended", 100))
        assert small.pool.blocks[blocks[0]].block_hash is not None
        (answer,) = parked.verify(small, "ended")
        assert answer.verdict == "unjudged"
        assert "takes CANARY_CONTROL=write or CANARY_RECOMPUTE when the engine starts" in answer.reason


def test_parked_kv_that_changed_is_told_where_it_did(small):
    """With fingerprints that fit the wrong bytes, or none: only a second computation can tell."""
    with guarded.guard(small, **QUIET) as guard:
        verified.teach(small)
        blocks = parked.serve(small, "ill", verified.prompt("ill", 100))
        parked.serve(small, "well", verified.prompt("well", 100))
        parked.scale(small, 1, blocks[1:2], 1.01)
        answers = parked.every(small)
        assert {name: answers[name].verdict for name in ("ill", "well")} == {"ill": "differs", "well": "same"}
        assert told(guard) == [(1, BLOCK, "ill", "attention")]


def test_bytes_of_a_parked_prefix_are_compared_with_their_fingerprints(small):
    """Before they are computed again, as those of running requests are."""
    with guarded.guard(small, read_check=0, scrub_budget="0", control="write") as guard:
        blocks = parked.serve(small, "flipped", verified.prompt("flipped", 100))
        parked.scale(small, 2, blocks[:1], 1.5)
        parked.verify(small, "flipped")
        guard.canary.drain()
        assert {v.kind for v in guard.findings.violations} >= {Kind.BYTES}


def test_what_was_evicted_is_gone_and_what_is_left_is_compared(small):
    """vLLM evicts the end of a prefix first. No wrong word of what others have written there since."""
    with guarded.guard(small, **QUIET) as guard:
        verified.teach(small)
        parked.serve(small, "one", verified.prompt("one", 160))
        blocks = parked.serve(small, "two", verified.prompt("two", 160))
        small.pool.evict_blocks({blocks[3]})
        (answer,) = parked.verify(small, "two")
        assert (answer.verdict, answer.tokens) == ("same", 3 * BLOCK)
        small.pool.evict_blocks({blocks[0]})
        turn = 0
        while parked.remembered(small).get("one").left():
            parked.serve(small, f"other {turn}", verified.prompt(f"other {turn}", 200))
            turn += 1
        with verified.scaled(small, WEIGHT, 1.05):
            answers = parked.verify(small, "one", "two")
        assert [(one.verdict, one.tokens) for one in answers] == [("gone", 0), ("gone", 0)]
        assert "0 of the 160 tokens that it left in the prefix cache are still there" in answers[0].reason
        assert told(guard) == []
        assert guard.canary.stats()["recompute_gone"] == 2


def test_a_prefix_that_goes_while_it_is_computed_again_is_gone(small):
    """Between two chunks."""
    with guarded.guard(small, **QUIET) as guard:
        verified.teach(small)
        blocks = parked.serve(small, "goes", verified.prompt("goes", 200))
        (session,) = HOOKS.sessions
        with verified.scaled(small, WEIGHT, 1.05):
            asked = session.recomputed.ask("goes", parked=True)
            parked.begin(small)
            assert small.step()
            assert not asked.done()
            small.pool.evict_blocks({blocks[0]})
            verified.finish(small)
            parked.idle(small)
        (answer,) = asked.result(0)
        assert (answer.verdict, answer.tokens) == ("gone", 0)
        assert told(guard) == []
        assert small.pool.get_num_free_blocks() == len(small.pool.blocks) - 1


def test_a_block_that_is_written_while_the_prefix_cache_still_names_it_is_gone(small):
    """An engine that hands out a parked block without evicting it: the records know that it holds something else."""
    with guarded.guard(small, **QUIET, lifetime="off") as guard:
        verified.teach(small)
        blocks = parked.serve(small, "kept", verified.prompt("kept", 100))
        pool = small.pool
        wrong = pool.blocks[blocks[2]]
        pool.free_block_queue.remove(wrong)
        pool.free_block_queue.prepend_n([wrong])
        evict, pool._maybe_evict_cached_block = pool._maybe_evict_cached_block, lambda block: False
        cached, pool.cache_full_blocks = pool.cache_full_blocks, lambda *args, **kwargs: None
        try:
            parked.serve(small, "writes", verified.prompt("writes", 20), 4)
        finally:
            pool._maybe_evict_cached_block, pool.cache_full_blocks = evict, cached
        assert parked.remembered(small).get("kept").left() == 96
        (answer,) = parked.verify(small, "kept")
        assert (answer.verdict, answer.tokens) == ("gone", 64)
        guard.canary.drain()
        assert guard.findings.violations == []


def test_what_is_remembered_has_a_bound_and_says_so(small):
    """Twice the tokens that the prefix cache has room for; the request that ended first goes first."""
    with guarded.guard(small, **QUIET) as guard:
        known = parked.remembered(small)
        for turn in range(20):
            parked.serve(small, f"r{turn}", verified.prompt(turn, 150), 2)
            assert known.tokens <= known.most_tokens == 2 * 48 * BLOCK
        assert known.names() == [f"r{turn}" for turn in range(4, 20)]
        assert len(known.names()) == 2 * 48 * BLOCK // (128 + 64)
        parked.serve(small, "r19", verified.prompt("again", 150), 2)
        assert known.names().count("r19") == 1
        (answer,) = parked.verify(small, "r0")
        assert (answer.verdict, answer.tokens) == ("unjudged", 0)
        assert "nothing is remembered that it left in the prefix cache" in answer.reason
        (full,) = guard.findings.told("parked_full")
        assert full.fields["most_tokens"] == known.most_tokens
        stats = guard.canary.stats()
        assert (stats["parked_remembered"], stats["parked_forgotten"]) == (21, 4)


def test_an_idle_engine_proves_prefixes_in_turn_and_leaves_the_cache_as_it_was(small):
    """For a share of the time, the least recently proven first; the order in which vLLM evicts stays the same."""
    with guarded.guard(small, **QUIET, recompute="100%") as guard:
        recomputes = parked.requests(small)._recomputes
        now = [100.0]
        recomputes._proofs._clock = lambda: now[0]
        for name in "abc":
            parked.serve(small, name, verified.prompt(name, 100))
        before = parked.queue(small)
        (session,) = HOOKS.sessions
        session.recomputed.answers.clear()
        for _ in range(18):
            parked.idle(small)
            now[0] += 0.06
        assert parked.queue(small) == before
        assert len(small.pool.blocks) - 1 == small.pool.get_num_free_blocks()
        answers = [one for one in session.recomputed.answers if one.parked]
        assert [one.request for one in answers] == [*"abcabca"][: len(answers)]
        assert len(answers) >= 6
        assert {one.verdict for one in answers} == {"same"}
        # Time spent counts: at a share of 1 % it rests 99 times as long.
        recomputes._share = 0.01
        parked.begin(small)
        now[0] += 1.0
        parked.idle(small)
        session.recomputed.answers.clear()
        now[0] += 98.0
        parked.idle(small)
        assert not session.recomputed.answers
        now[0] += 1.1
        parked.idle(small)
        assert len(session.recomputed.answers) == 1
        assert told(guard) == []


def test_an_idle_engine_evicts_nothing_to_prove_something(small):
    """Where all free blocks are of the prefix cache, nothing is computed again without being asked for, and counted."""
    with guarded.guard(small, **QUIET, recompute="100%") as guard:
        for turn in range(8):
            parked.serve(small, f"full {turn}", verified.prompt(f"full {turn}", 220))
        before = parked.queue(small)
        assert len(before) == 46
        parked.idle(small, 3)
        assert parked.queue(small) == before
        parked.serve(small, "one more", verified.prompt("one more", 40))
        assert guard.canary.stats()["parked_no_room"] >= 1
        (answer,) = parked.verify(small, "full 7")
        assert answer.verdict == "same"


def test_requests_of_users_go_first(small):
    """What is computed again ends at once where somebody waits, and who asked is answered later."""
    with guarded.guard(small, **QUIET):
        (session,) = HOOKS.sessions
        parked.serve(small, "long", verified.prompt("long", 200))
        asked = session.recomputed.ask("long", parked=True)
        parked.begin(small)
        assert small.step()
        small.submit("user", verified.prompt("user", 30), 6)
        verified.finish(small)
        assert len(small.answers["user"]) == 6
        parked.idle(small, 2)
        (answer,) = asked.result(0)
        assert (answer.verdict, answer.tokens) == ("same", 192)


def test_a_running_engine_answers_for_prefixes_too(small):
    """In the gaps that its users leave."""
    with guarded.guard(small, **QUIET):
        (session,) = HOOKS.sessions
        parked.serve(small, "ended", verified.prompt("ended", 100))
        verified.begin(small, 2, {"runs": verified.prompt("runs")})
        asked = session.recomputed.ask("ended", parked=True)
        running = session.recomputed.ask("ended")
        while not (asked.done() and running.done()):
            assert small.step()
        assert [one.verdict for one in asked.result(0)] == ["same"]
        assert [(one.verdict, one.parked) for one in running.result(0)] == [("unjudged", False)]
        verified.finish(small)


def test_clean_traffic_is_well_and_answers_stay_the_same(small):
    """Requests that share prefixes, evict each other's, and are computed again whenever nobody is served."""
    small.renew()
    draw = random.Random(5)
    heads = [verified.prompt(f"head {n}", 96) for n in range(3)]
    rounds = [
        [[*draw.choice(heads)[: draw.choice((32, 64, 96))], *verified.prompt((turn, 0), draw.randrange(8, 60))],
         *(verified.prompt((turn, n), 220) for n in (1, 2, 3))]
        for turn in range(10)
    ]  # fmt: skip
    plain = [small.serve(prompts, 10, f"t{turn}") for turn, prompts in enumerate(rounds)]
    with guarded.guard(small, **QUIET, recompute="100%") as guard:
        verdicts = []
        for turn, prompts in enumerate(rounds):
            assert small.serve(prompts, 10, f"t{turn}") == plain[turn]
            parked.requests(small)._recomputes._proofs._rest_until = 0.0
            parked.idle(small, 2)
            verdicts += [one.verdict for one in parked.every(small).values()]
        assert set(verdicts) == {"same", "gone"}
        assert verdicts.count("same") > 40
        assert guard.trouble() == []
        assert small.pool.get_num_free_blocks() == len(small.pool.blocks) - 1
        assert small.scheduler.requests == {}
