"""Requests that vLLM's scheduler has computed again: clean ones are never told, broken ones are, by their KV alone."""

import pytest
from canary_vllm.hooks import HOOKS
from vllm_on_cpu import guarded, parked, verified

from canary_adapters import is_internal, recompute_requests
from canary_core import CanaryError, Kind, Patches, Touch, recomputer

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("process 0")]
QUIET = dict(read_check=0, scrub_budget="0", bytes="off")
"""All checks of bytes are off."""


@pytest.fixture(scope="module")
def small():
    """An engine with weights that matter, in float32: equal bit for bit, whatever the batch. It serves LoRA adapters,
    one less than it has room for: the torch kernels of vLLM 0.32 give rows without an adapter the last one's."""
    from vllm_on_cpu.engine import SmallEngine

    options = dict(load_format="auto", num_gpu_blocks_override=48, max_num_seqs=12, max_lora_rank=8)
    return SmallEngine(verified.weighty(), enable_lora=True, max_loras=4, **options)


@pytest.fixture(scope="module")
def sixteen():
    """An engine in bfloat16, of whose layers the heads of attention give a large part: what one gives is above noise
    where it is a few per cent off."""
    from vllm_on_cpu.attention_types import checkpoint
    from vllm_on_cpu.engine import SmallEngine

    model, options = checkpoint("llama", layers=3, initializer_range=0.2), dict(num_gpu_blocks_override=48)
    return SmallEngine(model, load_format="auto", dtype="bfloat16", max_num_seqs=12, **options)


@pytest.fixture(scope="module")
def windowed():
    """An engine in float32 with one window of 48 tokens in all three layers."""
    from vllm_on_cpu.attention_types import checkpoint
    from vllm_on_cpu.engine import SmallEngine

    return SmallEngine(checkpoint("mistral", layers=3), load_format="auto", num_gpu_blocks_override=48)


@pytest.fixture(scope="module")
def adapters(small):
    """Three, by name."""
    return verified.adapters(small.runner.model_config.model, "abc")


def told(guard, *others):
    """Layer, position, request and rule of each finding of a recompute; ``others``: kinds that see it, too."""
    guard.canary.drain()
    found = guard.findings.violations
    assert {v.kind for v in found} - {Kind.RECOMPUTE} == set(others), found
    return [(v.layer, v.position, v.request, v.rule) for v in found if v.kind is Kind.RECOMPUTE]


def test_weights_that_changed_under_a_kept_cache_are_told_at_a_hit(small):
    """The KV of a hit is not what the weights of now compute; a request that hits nothing is well."""
    with guarded.guard(small, **QUIET) as guard:
        hits, fresh = verified.hit_under_other_weights(small)
        assert (hits.verdict, fresh.verdict) == ("differs", "same")
        assert told(guard) == [(1, 0, "hits", "brought")]
        assert "a hit brought its first 64 tokens" in guard.findings.violations[0].explanation


def test_a_length_one_short_in_decode_is_told_where_the_decode_begins(small):
    """Layer 0 is right, and so is the prompt."""
    prompt = verified.prompt("short")
    with guarded.guard(small, **QUIET) as guard:
        verified.teach(small)
        with verified.short_decodes(small, "ill"):
            verified.begin(small, verified.DECODED, {"ill": prompt, "well": prompt[::-1]})
        answers = verified.verify(small, "ill", "well")
        verified.finish(small)
        assert [one.verdict for one in answers] == ["differs", "same"]
        assert told(guard, Kind.READ_LENGTH) == [(1, len(prompt), "ill", "attention")]


def test_a_window_one_short_in_decodes_is_told_where_the_decode_begins(windowed):
    """Prefills have the right one."""
    prompt = verified.prompt("window")
    with guarded.guard(windowed, **QUIET) as guard:
        verified.teach(windowed, tokens=70)
        with verified.short_windows(windowed):
            verified.begin(windowed, verified.DECODED, {"ill": prompt})
        (ill,) = verified.verify(windowed, "ill")
        verified.finish(windowed)
        verified.begin(windowed, verified.DECODED, {"well": prompt})
        (well,) = verified.verify(windowed, "well")
        verified.finish(windowed)
        assert (ill.verdict, well.verdict) == ("differs", "same")
        assert told(guard) == [(1, len(prompt), "ill", "attention")]


def test_positions_one_too_many_behind_a_hit_are_told_where_the_hit_ends(small):
    """K of layer 0 alone differs first; what the hit brought is right."""
    prompt = verified.prompt("shifted")
    with guarded.guard(small, **QUIET) as guard:
        verified.teach(small)
        parked.serve(small, "before", prompt)
        with verified.shifted_positions(small, "ill"):
            verified.begin(small, verified.DECODED, {"ill": prompt, "well": verified.prompt("well")})
        answers = verified.verify(small, "ill", "well")
        verified.finish(small)
        assert [one.verdict for one in answers] == ["differs", "same"]
        assert told(guard) == [(0, 64, "ill", "half")]


@pytest.mark.parametrize("engine", ["small", "sixteen"])
def test_a_decode_kernel_that_adds_noise_in_one_head_is_told_where_the_decode_begins(engine, request):
    """5 % in layer 0, for one request of a batch, the first time it is computed again; the one beside it is well, and
    so are others with the same prompts before and after."""
    small, prompt, other = request.getfixturevalue(engine), verified.prompt("noisy"), verified.prompt("beside")
    with guarded.guard(small, **QUIET) as guard:
        verified.teach(small)
        for name in ("before", "ill", "after"):
            with verified.noisy_head(small, "ill"):
                verified.begin(small, verified.DECODED, {name: prompt, f"beside {name}": other})
            answers = verified.verify(small, name, f"beside {name}")
            verified.finish(small)
            assert [one.verdict for one in answers] == ["differs" if name == "ill" else "same", "same"]
            assert told(guard) == ([] if name == "before" else [(1, len(prompt), "ill", "attention")])


def test_a_length_one_short_in_a_later_chunk_is_told_where_the_chunk_begins(small):
    """The same chunk of the second computation is right. Lengths are compared in other forwards than that one."""
    prompt = verified.prompt("chunks", 120)
    with guarded.guard(small, **QUIET) as guard:
        verified.teach(small)
        with verified.short_later_chunks(small, "ill"):
            verified.begin(small, 2, {"ill": prompt})
        verified.begin(small, 2, {"well": prompt[::-1]})
        answers = verified.verify(small, "ill", "well")
        verified.finish(small)
        assert [one.verdict for one in answers] == ["differs", "same"]
        assert told(guard) == [(1, 64, "ill", "attention")]


def test_a_kernel_that_is_wrong_from_the_first_request_on_is_not_taken_for_noise(small):
    """Fresh requests with garbage teach nothing, which is told; once others have taught the noise, it is found."""
    with guarded.guard(small, **QUIET) as guard, verified.garbage_in_short_decodes(small, 120):
        verified.begin(small, verified.DECODED, {"first": verified.prompt("first", 30)})
        (first,) = verified.verify(small, "first")
        verified.finish(small)
        assert first.verdict == "unjudged"
        (apart,) = [e.fields for e in guard.findings.told("unjudged") if "unrelated tokens" in e.fields["reason"]]
        assert (apart["request"], apart["source"][:3], apart["position"]) == ("first", "k.1", 30)
        assert guard.canary.stats()["recompute_unlike"] == 1
        verified.teach(small, tokens=130)
        verified.begin(
            small, verified.DECODED, {"ill": verified.prompt("ill", 30), "well": verified.prompt("well", 130)}
        )
        # While the long one runs, no batch is short.
        (well,) = verified.verify(small, "well")
        small.core.abort_requests(["ill", "well"])
        verified.finish(small)
        verified.begin(small, verified.DECODED, {"again": verified.prompt("again", 30)})
        (ill,) = verified.verify(small, "again")
        verified.finish(small)
        assert (well.verdict, ill.verdict) == ("same", "differs")
        assert told(guard) == [(1, 30, "again", "attention")]


def test_bytes_that_changed_are_in_the_answer(small):
    """One bit of one token, of which the numbers say nothing: the answer is no ``same``, and the finding is told."""
    with guarded.guard(small, **{**QUIET, "bytes": "all"}) as guard:
        verified.teach(small)
        verified.begin(small, 4, {"ill": verified.prompt("ill"), "well": verified.prompt("well")})
        small.poke(1, "v", "ill", 50)
        ill, well = verified.verify(small, "ill", "well")
        verified.finish(small)
        guard.canary.drain()
        assert (ill.verdict, ill.bytes.changed, ill.bytes.position) == ("differs", 1, 50), ill.table()
        assert ill.bytes.source.startswith("v.1"), ill.table()
        assert (well.verdict, well.bytes.changed, well.bytes.share) == ("same", 0, 1.0), well.table()
        assert [v.kind for v in guard.findings.violations] == [Kind.BYTES]


def test_a_layer_that_was_skipped_for_one_request_is_told(small):
    """From the next layer on."""
    prompt = verified.prompt("skipped")
    with guarded.guard(small, **QUIET) as guard:
        verified.teach(small)
        with verified.skipped_layer(small, 0, "ill"):
            verified.begin(small, 2, {"ill": prompt, "well": prompt[::-1]})
        answers = verified.verify(small, "ill", "well")
        verified.finish(small)
        assert [one.verdict for one in answers] == ["differs", "same"]
        assert told(guard) == [(1, 0, "ill", "everywhere")]


def test_clean_traffic_is_well_and_answers_stay_the_same(small):
    """Hits and chunks, with as many internal requests as there is room for: each verdict is the same, no client gets an
    output of them, no block stays, and none of theirs is in the prefix cache."""
    small.renew()
    plain = guarded.traffic(small, 4, new_tokens=40)
    with guarded.guard(small, **QUIET, recompute="100%") as guard:
        answers = guarded.traffic(small, 4, new_tokens=40)
        (session,) = HOOKS.sessions
        assert answers == plain
        assert len(session.recomputed.answers) > 15
        assert {answer.verdict for answer in session.recomputed.answers} == {"same"}
        assert guard.trouble() == []
        assert small.pool.get_num_free_blocks() == len(small.pool.blocks) - 1
        assert small.scheduler.requests == {}


def test_vllms_own_counters_are_those_of_the_users_requests(small, monkeypatch):
    """Queries and hits of the prefix cache; one more request may run at a time."""
    from vllm.v1.metrics.stats import PrefixCacheStats

    def counted():
        small.renew()
        manager, stats = small.scheduler.kv_cache_manager, []
        for owner in (small.scheduler, manager):
            monkeypatch.setattr(owner, "log_stats", True)
        manager.prefix_cache_stats = PrefixCacheStats()
        Patches().follow(small.scheduler, "make_stats", lambda made, *_, **__: stats.append(made))
        guarded.traffic(small, 4, new_tokens=40)
        caches = [one.prefix_cache_stats for one in stats]
        counts = [sum(getattr(one, name) for one in caches) for name in ("requests", "queries", "hits")]
        return counts, max(one.num_running_reqs for one in stats)

    plain, most = counted()
    with guarded.guard(small, **QUIET, recompute="100%") as guard:
        assert counted() == (plain, most + 1)
        assert guard.canary.stats()["recomputed_requests"] > 15


def test_a_reset_of_the_prefix_cache_meets_no_second_computation(small):
    """Where the last request of a user has ended in the middle of one, it succeeds, as without Canary: else what is
    kept would be served under the weights that come next."""
    with guarded.guard(small, **QUIET) as guard:
        (session,) = HOOKS.sessions
        for turn in range(2):
            name = f"reset {turn}"
            small.submit(name, verified.prompt(name, 150), verified.DECODED)
            while len(small.answers[name]) < verified.DECODED - 2 - turn:
                assert small.step()
            asked = session.recomputed.ask(name)
            while name in small.scheduler.requests:
                assert small.step()
            assert any(map(is_internal, small.scheduler.requests))
            assert small.scheduler.reset_prefix_cache()
            assert small.pool.get_num_free_blocks() == len(small.pool.blocks) - 1
            parked.serve(small, f"behind {turn}", verified.prompt(name, 150))
            (answer,) = asked.result(0)
            assert answer.verdict == "unjudged"
        assert guard.findings.violations == []


def test_requests_with_adapters_are_well_and_answers_stay_the_same(small, adapters):
    """Three adapters and none in one batch, with hits within each: computed again with the same adapter, and so is what
    they left, as long as it is loaded."""
    prompts = [prompt[:100] for prompt in guarded.prompts("adapters", 4)]
    more = [{"lora_request": adapter} for adapter in adapters.values()]

    def rounds():
        for turn in range(4):
            for number, who in enumerate([{}, *more]):
                small.submit(f"{turn} {number}", prompts[turn % 2 + number % 2], 60, **who)
            verified.finish(small)
        return dict(small.answers)

    small.renew()
    plain = rounds()
    assert len({tuple(plain[f"0 {number}"]) for number in range(4)}) == 4
    with guarded.guard(small, **QUIET, recompute="100%") as guard:
        assert rounds() == plain
        (session,) = HOOKS.sessions
        again = [answer for answer in session.recomputed.answers if not answer.parked]
        assert {answer.verdict for answer in again} == {"same"}
        assert {answer.request[-1] for answer in again} >= {"1", "2", "3"}
        left = parked.every(small)
        assert [left[f"3 {number}"].verdict for number in range(4)] == ["same"] * 4
        assert guard.trouble() == []


def test_an_adapter_that_changed_under_a_kept_cache_is_told(small, adapters):
    """At a hit, and in what an ended request left; another adapter's requests, and those without one, are well."""
    tokens, a, b = verified.prompt("adapter"), {"lora_request": adapters["a"]}, {"lora_request": adapters["b"]}
    with guarded.guard(small, **QUIET, control="write") as guard:
        verified.teach(small)
        for name, who in (("a before", a), ("b before", b), ("none before", {})):
            parked.serve(small, name, tokens, **who)
        with verified.scaled_adapter(small, 1, 0, 1.2):
            for name, who in (("a", a), ("b", b), ("none", {})):
                verified.begin(small, 2, {f"{name} hits": tokens}, **who)
            verified.begin(small, 2, {"a fresh": tokens[::-1]}, **a)
            answers = verified.verify(small, "a hits", "b hits", "none hits", "a fresh")
            assert [one.verdict for one in answers] == ["differs", "same", "same", "same"]
            verified.finish(small)
            answers = parked.verify(small, "a before", "b before", "none before")
            assert [one.verdict for one in answers] == ["differs", "same", "same"]
        assert told(guard) == [(1, 0, "a hits", "brought"), (1, 0, "a before", "everywhere")]


def test_what_an_adapter_left_is_computed_again_in_an_engine_that_never_idled(small, adapters):
    """Beside a request with the same adapter."""
    tokens, a = verified.prompt("never idle"), {"lora_request": adapters["a"]}
    with guarded.guard(small, **QUIET, control="write") as guard:
        (session,) = HOOKS.sessions
        parked.serve(small, "a left", tokens, **a)
        verified.begin(small, 2, {"a runs": tokens[::-1]}, **a)
        asked = session.recomputed.ask("a left", parked=True)
        while not asked.done():
            assert small.step()
        (answer,) = asked.result(0)
        assert (answer.verdict, answer.reason) == ("same", None)
        verified.finish(small)
        assert guard.findings.violations == []


def test_what_an_adapter_left_is_not_computed_again_once_it_is_gone(small, adapters):
    """Nor beside a request with another one, which may take its place: no file of an adapter is read for a proof."""
    tokens, a, b = verified.prompt("gone"), {"lora_request": adapters["a"]}, {"lora_request": adapters["b"]}
    with guarded.guard(small, **QUIET, recompute="100%") as guard:
        (session,) = HOOKS.sessions
        parked.serve(small, "a left", tokens, **a)
        parked.begin(small)
        verified.finish(small)
        verified.begin(small, 2, {"b runs": tokens}, **b)
        asked = session.recomputed.ask("a left", parked=True)
        while not asked.done():
            assert small.step()
        verified.finish(small)
        assert small.core.remove_lora(1)
        assert small.core.remove_lora(2)
        loads = Patches()
        loads.wrap(small.runner.lora_manager, "_load_adapter", lambda _: pytest.fail)
        recomputes = parked.requests(small)._recomputes
        recomputes._proofs._rest_until = 0.0
        parked.idle(small, 3)
        (beside,), (gone,) = asked.result(0), parked.verify(small, "a left")
        loads.undo()
        for answer in (beside, gone):
            assert (answer.verdict, "its adapter is not loaded just now" in answer.reason) == ("unjudged", True)
        parked.serve(small, "counted", tokens[:40])
        assert guard.canary.stats()["parked_no_adapter"] >= 1
        assert guard.findings.violations == []


def test_so_many_are_computed_again_and_no_more(small, monkeypatch):
    """A number, in the place of a share: beyond those that teach the noise."""
    monkeypatch.setattr(recompute_requests, "TEACHING", 4)
    small.renew()
    plain = guarded.traffic(small, 4, new_tokens=40)
    with guarded.guard(small, **QUIET, recompute="3") as guard:
        assert guarded.traffic(small, 4, new_tokens=40) == plain
        (session,) = HOOKS.sessions
        assert len(session.recomputed.answers) == 4 + 3
        verified.begin(small, 2, {"asked": verified.prompt("asked")})
        (asked,) = verified.verify(small, "asked")
        verified.finish(small)
        assert asked.verdict == "same"
        assert guard.trouble() == []


@pytest.mark.parametrize(
    ("requests", "counted", "reason"),
    [(12, "recompute_no_room", "no second one fits in"), (1, "recompute_too_short", "32 decoded tokens")],
)
def test_a_scheduler_that_finds_nothing_to_compute_again_says_so(requests, counted, reason, small, monkeypatch):
    """All seats are taken; or a request has no hit, and too few decoded tokens: one event, and a counter."""
    monkeypatch.setattr(recomputer, "STARVED_LOOKS", 3)
    with guarded.guard(small, **QUIET, recompute="100%") as guard:
        for name in range(requests):
            small.submit(str(name), verified.prompt(name, 40), 24)
        while small.step():
            pass
        assert guard.canary.stats()[counted] >= 3
        (starved,) = guard.findings.told("recompute_starved")
        assert reason in starved.fields["reason"]
        assert len(HOOKS.sessions[0].recomputed.answers) == 0


def test_the_scheduler_has_its_own_methods_until_somebody_asks(small):
    """But for ``schedule``, which is followed for the blocks. What came from a hit before is known all the same."""
    prompt = verified.prompt("followed")
    with guarded.guard(small, **QUIET):
        scheduler, coordinator = small.scheduler, small.scheduler.kv_cache_manager.coordinator
        verified.begin(small, 2, {"first": prompt})
        verified.begin(small, 2, {"second": prompt})
        assert "update_from_output" not in vars(scheduler)
        assert "cache_blocks" not in vars(coordinator)
        assert scheduler.schedule.__wrapped__ == type(scheduler).schedule.__get__(scheduler)
        pairs = verified.compared()
        answers = verified.verify(small, "first", "second")
        assert {"schedule", "update_from_output"} <= vars(scheduler).keys()
        assert "cache_blocks" in vars(coordinator)
        verified.finish(small)
        assert [answer.verdict for answer in answers] == ["same", "same"]
        assert {pair.request: pair.touches for pair in pairs} == {"first": (), "second": (Touch("hit", 64),)}
    assert not {"schedule", "update_from_output"} & vars(scheduler).keys()
    assert "cache_blocks" not in vars(coordinator)


def test_all_that_run_can_be_asked_for_at_once(small):
    """With one computation for a request that several ask for; whoever has gone is not waited for."""
    with guarded.guard(small, **QUIET):
        (session,) = HOOKS.sessions
        verified.begin(small, 2, {name: verified.prompt(name) for name in "abc"})
        gone, named, unknown, everybody = map(session.recomputed.ask, ("a", "b", "nobody", None))
        assert gone.cancel()
        while not (named.done() and unknown.done() and everybody.done()):
            assert small.step()
        assert sorted(one.request for one in everybody.result()) == ["a", "b", "c"]
        assert [one.request for one in named.result()] == ["b"]
        assert [(one.verdict, "no request of that" in one.reason) for one in unknown.result()] == [("unjudged", True)]
        told = [answer.request for answer in session.recomputed.answers]
        assert sorted(told) == ["a", "b", "c", "nobody"]
        verified.finish(small)
    after = session.recomputed.ask("a")
    with pytest.raises(CanaryError, match="the engine ended"):
        after.result(0)
