"""``CANARY_ON_VIOLATION``: what is done about corrupted KV before an answer is given out. Engines that are shared with
test_engine; bits are flipped from outside, by vLLM's own tables."""

import random
from functools import cache

import pytest
import torch
from canary_vllm.actions.protection import Protection
from vllm_on_cpu import guarded, parked_flips
from vllm_on_cpu.engine import BLOCK, SmallEngine
from vllm_on_cpu.late_verdicts import know_findings_with_tokens
from vllm_on_cpu.scripts import said_by, told_by

from canary_core import Kind, Phase, hook_manager, hookimpl

pytestmark = pytest.mark.timeout(600)
LLAMA = pytest.param("llama", marks=pytest.mark.xdist_group("process 0"))
ASYNC = pytest.param("async", marks=pytest.mark.xdist_group("process 0"))
HYBRID = pytest.param("hybrid", marks=pytest.mark.xdist_group("process 1"))
ONLY = pytest.mark.parametrize("engine", [LLAMA], indirect=True)
PROMPT = [random.Random("protection").randrange(3, 500) for _ in range(100)]
QUIET = dict(read_check=0, scrub_budget="0")


def begin(small, name, tokens, prompt=PROMPT):
    """A request that has given out so many tokens."""
    small.submit(name, prompt, 20)
    while len(small.answers[name]) < tokens:
        small.step()


def finish(small):
    """Serves to the end, which must come."""
    for _ in range(400):
        if not small.step():
            return
    pytest.fail("requests never end")


def told(guard, *names):
    """The requests of these events, by name."""
    return {name: [event.fields["request"] for event in guard.findings.told(name)] for name in names}


@ONLY
def test_no_wrong_answer_from_parked_kv_that_changed(engine):
    """Bits flip in the prefix cache, each in a block that the next request hits. By default wrong answers are given
    out; with protect each one is right, and none ends with an error."""
    plain = parked_flips.serve(engine.small, 12, "report")
    assert plain.wrong > 0
    served = parked_flips.serve(engine.small, 12, "protect")
    assert (served.wrong, served.error, served.right) == (0, 0, served.asked)
    assert 6 < served.flipped <= served.recomputed


@pytest.mark.parametrize("engine", [LLAMA, ASYNC, HYBRID], indirect=True)
def test_a_hit_on_changed_kv_is_computed_again_before_a_token_is_given_out(engine):
    """Also with asynchronous scheduling, where the next step is under way, and where groups of layers share blocks;
    requests beside it go on."""
    small = engine.small
    other = guarded.prompts("protection", 1)[0]
    small.renew()
    right, beside = small.serve([PROMPT, other], 20)
    with guarded.guard(small, on_violation="protect", **QUIET) as guard:
        small.serve([PROMPT], 20, "first")
        draw = random.Random(7)
        begin(small, "well", 3, other)
        small.submit("ill", PROMPT, 20)
        assert parked_flips.flip_parked(small, "ill", draw)
        finish(small)
        assert small.answers["ill"] == right
        assert small.answers["well"] == beside
        assert told(guard, "recomputed", "aborted") == {"recomputed": ["ill"], "aborted": []}
        # What was computed from the block has left the cache with it.
        assert small.serve([PROMPT], 20, "after")[0] == right
        assert len(guard.findings.told("recomputed")) == 1


class Verdicts:
    """Keeps them."""

    def __init__(self):
        self.all = []

    @hookimpl
    def canary_verdict(self, verdict):
        """Keeps it."""
        self.all.append(verdict)


@pytest.mark.parametrize("engine", [LLAMA, ASYNC], indirect=True)
def test_a_late_finding_of_tokens_that_were_taken_back_takes_no_others(engine):
    """As on a GPU, where the record of a forward may tell what it finds after the check has: the request was computed
    again since."""
    small, verdicts = engine.small, Verdicts()
    small.renew()
    (right,) = small.serve([PROMPT], 20)
    with guarded.guard(small, verdicts, on_violation="protect", **QUIET) as guard:
        small.serve([PROMPT], 20, "first")
        small.submit("q", PROMPT, 20)
        assert parked_flips.flip_parked(small, "q", random.Random(7))
        while len(small.answers["q"]) < 3:
            small.step()
        for verdict in list(verdicts.all):
            hook_manager().hook.canary_verdict(verdict=verdict)
        finish(small)
        assert told(guard, "recomputed", "aborted") == {"recomputed": ["q"], "aborted": []}
        assert small.answers["q"] == right


@pytest.mark.parametrize("engine", [LLAMA, ASYNC], indirect=True)
def test_a_bit_that_flips_in_the_prefix_cache_is_put_back(engine):
    """With ``CANARY_REPAIR``: while another request runs, ten times, any bit of any layer. The cache's bytes are what
    they were, nothing is evicted, and the request that hits them is answered right."""
    import torch

    small, other, draw = engine.small, guarded.prompts("protection", 1)[0], random.Random(5)
    small.renew()
    (right,) = small.serve([PROMPT], 20)
    settings = {**QUIET, "on_violation": "quarantine", "repair": True, "scrub_budget": "16MiB"}
    with guarded.guard(small, **settings) as guard:
        begin(small, "first", 1)
        (blocks,) = small.blocks("first")
        finish(small)
        for turn in range(10):
            tensor = draw.choice([tensor for _, tensor in small.tensors()]).view(torch.int32)
            # Of four blocks the last one is not full, so it is not kept.
            block = tensor[draw.choice(blocks[:3])]
            intact, bits = block.clone(), draw.choice([1 << draw.randrange(31), 3 << 22])
            block[tuple(draw.randrange(size) for size in block.shape)] ^= bits
            assert not torch.equal(block, intact)
            small.serve([other], 20, f"other {turn}")
            assert torch.equal(block, intact)
            assert len(guard.findings.told("repaired")) == turn + 1
        assert small.serve([PROMPT], 20, "after")[0] == right
        assert len(guard.findings.violations) == 10
        assert guard.findings.told("quarantined") == []
        assert told(guard, "recomputed", "aborted") == {"recomputed": [], "aborted": []}


@pytest.mark.parametrize("engine", [LLAMA, ASYNC], indirect=True)
def test_no_wrong_answer_from_kv_that_changes_within_a_forward(engine):
    """All reads are compared, and a block changes after that, before attention reads it: the token of this forward is
    wrong, and the forward after it finds the change. By default answers are wrong; with protect each request ends with
    an error."""
    small, draw = engine.small, random.Random("within")
    prompts = [[draw.randrange(3, 500) for _ in range(50)] for _ in range(6)]
    small.renew()
    right = [small.serve([prompt], 12)[0] for prompt in prompts]
    wrong = {}
    for mode in ("report", "protect"):
        with guarded.guard(small, on_violation=mode, read_check=-1, incident_limit=1) as guard:
            ends = []
            for number, prompt in enumerate(prompts):
                small.submit(f"{mode} {number}", prompt, 12)
                answer, end = _served_with_a_change_within(small, f"{mode} {number}")
                ends.append("right" if answer == right[number] else end)
            wrong[mode] = ends.count("length")
            assert mode == "report" or ends == ["error"] * 6
            assert {(v.kind, v.phase) for v in guard.findings.violations} == {(Kind.BYTES, Phase.PRE_FORWARD)}
    assert wrong["report"] > 0
    assert wrong["protect"] == 0


def _served_with_a_change_within(small, name):
    """Serves the request, whose first block is overwritten in the second layer within a decode, before that layer.
    Returns the answer and how it ended."""
    layer = small.runner.get_model().model.layers[1]
    ((_, cache),) = [(where, tensor) for where, tensor in small.tensors() if ".1." in where]
    changed = []

    def change(*_):
        if not changed and len(small.answers[name]) == 5:
            changed.append(small.blocks(name)[0][0])
            cache[changed[0]].fill_(1e4)

    hook = layer.register_forward_pre_hook(change)
    finish(small)
    hook.remove()
    assert changed
    return small.answers.pop(name), small.ends.pop(name)


@ONLY
def test_quarantine_computes_a_running_request_again_with_its_tokens(engine):
    """What was given out so far is not in doubt for this mode."""
    small = engine.small
    small.renew()
    (right,) = small.serve([PROMPT], 20)
    with guarded.guard(small, on_violation="quarantine", read_check=-1) as guard:
        begin(small, "ill", 5)
        small.poke(1, "k", "ill", 5)
        finish(small)
        assert small.answers["ill"] == right
        assert told(guard, "recomputed", "aborted") == {"recomputed": ["ill"], "aborted": []}


@ONLY
def test_a_running_request_ends_with_an_error_where_its_tokens_may_be_wrong(engine):
    """The scrub finds the slot some steps after it changed: nobody knows which tokens were computed from it. vLLM's
    finish reason is ``error``, and the blocks are free again."""
    small = engine.small
    with guarded.guard(small, on_violation="protect", read_check=0, scrub_budget="64KiB") as guard:
        free = small.pool.get_num_free_blocks()
        begin(small, "ill", 5)
        small.poke(1, "k", "ill", 5)
        finish(small)
        assert small.ends["ill"] == "error"
        assert told(guard, "recomputed", "aborted") == {"recomputed": [], "aborted": ["ill"]}
        assert small.pool.get_num_free_blocks() == free
        again = small.serve([PROMPT], 20, "after")
        assert (small.ends["after-0"], again) == ("length", small.serve([PROMPT], 20, "once more"))


@ONLY
def test_an_error_while_acting_says_that_tokens_may_have_left(engine, monkeypatch):
    """The engine goes on, and whoever reads the event knows that an answer may be wrong."""
    small = engine.small
    with guarded.guard(small, on_violation="protect", read_check=-1) as guard:
        begin(small, "ill", 2)
        small.poke(0, "v", "ill", 1)
        monkeypatch.setattr(Protection, "_evict", None)
        finish(small)
        reason = guard.findings.told("quarantine_failed")[0].fields["reason"]
        assert reason.startswith("TypeError: ")
        assert "tokens of this step may have been given out" in reason
        assert small.ends["ill"] == "length"


@ONLY
def test_what_is_always_wrong_ends_with_an_error(engine):
    """A fault that comes back whatever is done: the request is computed again twice, then ends."""
    small = engine.small
    with guarded.guard(small, on_violation="quarantine", read_check=-1) as guard:
        begin(small, "ill", 2)
        for _ in range(200):
            if small.running("ill"):
                small.poke(0, "v", "ill", 1)
            if not small.step():
                break
        assert small.ends["ill"] == "error"
        assert told(guard, "recomputed", "aborted") == {"recomputed": ["ill"] * 2, "aborted": ["ill"]}


@cache
def windows_ahead() -> SmallEngine:
    """Layers with windows, asynchronous scheduling, answers that depend on all of the prompt. Never given up, as
    `conftest.shared`."""
    small = SmallEngine("gemma3", async_scheduling=True, num_gpu_blocks_override=64)
    with torch.no_grad():
        for layer in small.runner.get_model().model.layers:
            layer.input_layernorm.weight.fill_(1000)
    return small


@pytest.mark.xdist_group("process 0")
def test_what_hits_a_wrong_prefix_beyond_its_window_is_computed_again():
    """Asynchronous scheduling, and findings that come with the tokens, as on a GPU. A request hits a block with flipped
    bits; before that is known, the next batch is made, with a request that hits what the first one is computing, and
    has not the block, which is outside of its window. By default its answer is wrong; with protect both are right, and
    another request that begins in that batch goes on."""
    small = windows_ahead()
    draw = random.Random("windows")
    ill, beside = ([draw.randrange(3, 500) for _ in range(5 * BLOCK)] for _ in range(2))
    shares = ill + beside[:20]
    right = small.serve([ill, shares, beside[:30]], 8)
    for mode in ("report", "protect"):
        with guarded.guard(small, on_violation=mode, **QUIET) as guard:
            small.serve([ill[: 3 * BLOCK + 5]], 8, "first")
            small.submit("ill", ill, 8)
            found = small.scheduler.kv_cache_manager.get_computed_blocks(small.scheduler.requests["ill"])[0].blocks
            # Of three blocks the window has two.
            window = next(number for number, blocks in enumerate(found) if blocks[0].is_null)
            flipped = found[window][1].block_id
            name = small.runner.kv_cache_config.kv_cache_groups[window].layer_names[0]
            cache = small.runner.compilation_config.static_forward_context[name].kv_cache
            cache[flipped].view(torch.int32).flatten()[::3] ^= 1 << 29
            late = know_findings_with_tokens()
            try:
                small.core.step_fn()
                small.submit("shares", shares, 8)
                small.submit("beside", beside[:30], 8)
                held = None
                while small.scheduler.requests:
                    small.step()
                    held = held or (small.blocks("shares") if "shares" in small.scheduler.requests else None)
            finally:
                late.undo()
            answers = [small.answers[name] for name in ("ill", "shares", "beside")]
            assert answers[2] == right[2]
            if mode == "report":
                # It has what the first one was computing, and not the block with the flipped bits.
                assert held is not None
                assert flipped not in held[window]
                assert answers[1] != right[1]
            else:
                assert answers == right
                assert told(guard, "recomputed", "aborted") == {"recomputed": ["shares", "ill"], "aborted": []}


@ONLY
def test_abort_ends_the_requests_that_have_the_block(engine):
    """And no others; the block stays where it is."""
    small = engine.small
    other = guarded.prompts("protection", 1)[0]
    small.renew()
    (beside,) = small.serve([other], 20)
    with guarded.guard(small, on_violation="abort", read_check=-1) as guard:
        small.submit("well", other, 20)
        begin(small, "ill", 3)
        small.poke(1, "k", "ill", 5)
        finish(small)
        assert small.ends == {"ill": "error", "well": "length"}
        assert small.answers["well"] == beside
        assert told(guard, "recomputed", "aborted") == {"recomputed": [], "aborted": ["ill"]}
        assert guard.findings.told("quarantined") == []


@ONLY
def test_what_was_computed_from_a_block_leaves_the_cache_with_it(engine):
    """Its own block is good by itself, but what lies there is wrong."""
    small = engine.small
    with guarded.guard(small, on_violation="protect", **QUIET) as guard:
        small.serve([PROMPT, PROMPT[:40]], 4, "first")
        cached = {block.block_id for block in small.pool.blocks if block.block_hash is not None}
        small.serve(guarded.prompts("unrelated", 1), 4, "unrelated")
        unrelated = {b.block_id for b in small.pool.blocks if b.block_hash is not None} - cached
        small.submit("ill", PROMPT, 4)
        first, *rest = small.scheduler.kv_cache_manager.get_computed_blocks(small.scheduler.requests["ill"])[0].blocks[
            0
        ]
        hashes = {block.block_id: block.block_hash for block in (first, *rest)}
        next(tensor for _, tensor in small.tensors())[first.block_id].flatten()[0] = 7.0
        while not guard.findings.told("quarantined"):
            small.step()
        now = {block.block_id: block.block_hash for block in small.pool.blocks}
        assert len(rest) > 1
        assert [number for number, hash in hashes.items() if now[number] == hash] == []
        assert all(now[number] is not None for number in unrelated)
        finish(small)


@pytest.mark.parametrize("engine", [LLAMA, HYBRID], indirect=True)
def test_clean_traffic_is_left_alone(engine):
    """With hits, preemption and eviction: nothing is computed again, ended or evicted, the answers are those without
    Canary, and the hits were compared."""
    small = engine.small
    small.renew()
    plain = guarded.traffic(small, 6)
    with guarded.guard(small, on_violation="protect", **QUIET) as guard:
        assert guarded.traffic(small, 6) == plain
        assert guard.trouble() == []
        assert guard.canary.stats()["hit_blocks"] > 10
        assert [v.kind for v in guard.findings.violations] == []


@ONLY
def test_engines_of_one_process_act_each_for_its_own(engine, another):
    """Two engines take turns, the same prompt in both, and a bit flips in what one of them has parked. That one
    computes its request again, and the event names it; the other's request, with the same blocks, goes on."""
    for small in (engine.small, another.small):
        small.renew()
        (right,) = small.serve([PROMPT], 20)
    with guarded.guard(engine.small, on_violation="protect", **QUIET) as guard:
        another.small.renew()
        for small in (engine.small, another.small):
            small.serve([PROMPT], 20, "first")
        for turn, ill in enumerate((engine.small, another.small, engine.small)):
            for small in (engine.small, another.small):
                small.submit(f"{'ill' if small is ill else 'well'} {turn}", PROMPT, 20)
            assert parked_flips.flip_parked(ill, f"ill {turn}", random.Random(turn))
            while any([engine.small.step(), another.small.step()]):
                pass
            for small in (engine.small, another.small):
                assert small.answers[f"{'ill' if small is ill else 'well'} {turn}"] == right
        assert told(guard, "recomputed", "aborted") == {"recomputed": ["ill 0", "ill 1", "ill 2"], "aborted": []}
        first, second = (event.fields["model"] for event in guard.findings.told("attached"))
        assert [event.fields["model"] for event in guard.findings.told("recomputed")] == [first, second, first]
        assert guard.findings.told("quarantine_failed") == []


@ONLY
def test_hits_that_can_not_be_compared_are_told(engine):
    """Without bytes, and once blocks can't be followed any more."""
    with guarded.guard(engine.small, on_violation="protect", bytes="off") as guard:
        (event,) = guard.findings.told("hits_unchecked")
        assert "CANARY_BYTES=off" in event.fields["reason"]


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    ("rank", "words"),
    [
        ("1", ["late", "ahead"]),
        ("0", ["late", "stages"]),
        *(
            pytest.param(rank, words, marks=pytest.mark.beyond_ci("rank 1, late; and test_processes: tp2"))
            for rank, words in (("0", []), ("1", []), ("0", ["late", "ahead"]), ("1", ["late", "ahead", "ray"]))
        ),
        pytest.param("1", ["late", "stages"], marks=pytest.mark.beyond_ci("the other stage")),
    ],
)
def test_what_one_rank_finds_is_not_given_out_by_the_other(rank, words):
    """Two workers and the scheduler, each in a process of its own: bits flip in the shard of one tensor-parallel rank
    only, also of the one whose outputs vLLM does not take, or in the layers of one stage of a pipeline with batches in
    flight, and every answer is right. Also where a rank knows what it has found when it knows its tokens, or has waited
    for its forward, as on a GPU; with asynchronous scheduling; and with Ray's workers."""
    if "ray" in words:
        pytest.importorskip("ray", reason="ray is not installed here")
    count = 4 if "stages" in words else 6
    settings = dict(CANARY_ON_VIOLATION="protect", CANARY_SCRUB_BUDGET="0", CANARY_LOG_FORMAT="json")
    told, events = said_by("protect_script", rank, str(count), *words, plugins="vllm", **settings)
    # Stages are asked three at a time.
    asked = count * (3 if "stages" in words else 1)
    assert told == {"asked": asked, "right": asked, "wrong": 0, "error": 0}
    assert sum(event["event"] == "recomputed" for event in events) == asked
    assert [event for event in events if event["event"] in ("aborted", "quarantine_failed")] == []


@pytest.mark.xdist_group("processes")
@pytest.mark.beyond_ci("protect over Ray's workers, and the tests of one process here")
@pytest.mark.parametrize(("mode", "ends"), [("quarantine", "recomputed"), ("abort", "aborted")])
def test_other_actions_over_ray(mode, ends):
    """What a Ray worker of rank 1 finds by comparing all reads is acted on in the scheduler's process: each request is
    computed again and answered right, or ends with an error."""
    pytest.importorskip("ray", reason="ray is not installed here")
    settings = dict(CANARY_ON_VIOLATION=mode, CANARY_READ_CHECK="-1", CANARY_LOG_FORMAT="json")
    told, events = said_by("protect_script", "1", "6", "ray", plugins="vllm", **settings)
    right = 6 if mode == "quarantine" else 0
    assert told == {"asked": 6, "right": right, "wrong": 0, "error": 6 - right}
    assert [event["event"] for event in events if event["event"] in ("recomputed", "aborted")] == [ends] * 6


@pytest.mark.xdist_group("processes")
@pytest.mark.takes_turns("the tests of one process here")
@pytest.mark.parametrize(
    ("mode", "workers"),
    [
        # By default is what the other test of parked KV has, too.
        pytest.param("report", "2", marks=pytest.mark.beyond_ci("the test of one process here")),
        ("protect", "2"),
        ("protect", "stages"),
        pytest.param("protect", "replicas", marks=pytest.mark.beyond_ci("replicas are engines of their own")),
    ],
)
def test_a_client_of_the_server_gets_no_wrong_answer(mode, workers):
    """Answers of two tensor-parallel ranks, two pipeline stages or two data-parallel replicas, streamed to the openai
    package, while bits flip in the parked KV of one: many are wrong by default, and with protect each is right."""
    told = told_by("client_script", "3", workers, plugins="vllm", CANARY_ON_VIOLATION=mode, CANARY_LOG_FORMAT="json")
    assert told["clean"] == ["answered"] * 6
    assert told["flips"] > 20
    if mode == "report":
        assert told["wrong"] > 6
        assert told["events"]["incident"] > 0
    else:
        assert (told["right"], told["wrong"], told["error"]) == (18, 0, 0)
        assert told["events"]["recomputed"] > 0
    # Each replica computes again what it has found itself.
    assert workers != "replicas" or told["acted"] == told["found"]
