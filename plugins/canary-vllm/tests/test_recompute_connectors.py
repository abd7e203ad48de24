"""Requests beside a KV connector, computed again on a real vLLM: the connector never hears of an internal one, and what
its tier brings of another adapter, or of other weights, is told by recompute alone."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from canary_vllm.hooks import HOOKS
from vllm_on_cpu import guarded, parked, verified
from vllm_on_cpu.engine import BLOCK, SmallEngine

from canary_core import Kind, Touch

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("process 0")]
CONNECTOR = dict(
    kv_connector="HostStore", kv_connector_module_path="vllm_on_cpu.host_store", kv_role="kv_both",
    kv_load_failure_policy="recompute",
)  # fmt: skip
QUIET = dict(read_check=0, scrub_budget="0", bytes="off", ledger=0, ledger_private="HostStore")
"""All checks of bytes are off, and nothing is remembered of what was stored."""
STEPS = pytest.mark.parametrize("wait_steps", [0, 3], ids=["while the forward runs", "steps before"])


@pytest.fixture(scope="module")
def folder() -> str:
    """A model with weights that matter, in float32: equal bit for bit, whatever the batch."""
    return verified.weighty()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, id="in step", marks=pytest.mark.takes_turns("the same with asynchronous scheduling")),
        pytest.param(True, id="asynchronous"),
    ],
)
def small(request, folder) -> Iterator[SmallEngine]:
    """An engine with adapters and a connector that is not vLLM's own."""
    made = SmallEngine(
        folder, load_format="auto", num_gpu_blocks_override=64, max_num_seqs=12, kv_transfer_config=CONNECTOR,
        async_scheduling=request.param, enable_lora=True, max_loras=3, max_lora_rank=8,
    )  # fmt: skip
    yield made
    made.end()


@pytest.fixture(scope="module")
def adapters(folder) -> dict[str, Any]:
    """Two adapters with weights that matter."""
    return verified.adapters(folder, "ab")


@pytest.fixture
def store() -> Any:
    """What the connector has stored: nothing."""
    from vllm_on_cpu import host_store

    host_store.STORE.__init__()
    return host_store.STORE


def told(guard):
    """Layer, position, request and rule of each finding."""
    guard.canary.drain()
    assert {v.kind for v in guard.findings.violations} <= {Kind.RECOMPUTE}, guard.findings.violations
    return [(v.layer, v.position, v.request, v.rule) for v in guard.findings.violations]


def traffic(small: SmallEngine, rounds: int = 4) -> list[list[list[int]]]:
    """Answers of rounds of requests, of which each is served twice. What vLLM's own cache has is given up between, so
    that the connector is asked."""
    answers = []
    for turn in range(rounds):
        for again in range(2):
            small.scheduler.reset_prefix_cache()
            answers.append(small.serve(guarded.prompts(f"tier {turn}", 4), 40, f"t{turn}{again}"))
    return answers


def stored(store: Any) -> tuple[int, dict[Any, Any]]:
    """How many blocks were brought, and all bytes that are stored."""
    return store.loads, {k: {n: t.clone() for n, t in layers.items()} for k, layers in store.blocks.items()}


def same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Whether two stores have the same bytes under the same keys."""
    return one.keys() == other.keys() and all(one[k][n].equal(other[k][n]) for k in one for n in one[k])


@STEPS
def test_clean_traffic_is_well_and_the_tier_stays_what_it_was(small, store, wait_steps):
    """With as many internal requests as there is room for: each verdict is the same, answers, loads and all that is
    stored are as without Canary, and the connector has its own functions again."""
    small.renew()
    store.wait_steps = wait_steps
    plain, before = traffic(small), stored(store)
    store.__init__()
    store.wait_steps = wait_steps
    own = set(vars(small.scheduler.connector))
    with guarded.guard(small, **QUIET, recompute="100%") as guard:
        pairs = verified.compared()
        assert traffic(small) == plain
        (session,) = HOOKS.sessions
        answers, after = session.recomputed.answers, stored(store)
        assert len(answers) > 15
        assert {answer.verdict for answer in answers} == {"same"}
        assert sum(any(touch.what == "arrival" for touch in pair.touches) for pair in pairs) > 5
        assert (after[0], same(after[1], before[1])) == (before[0], True)
        assert before[0] > 10
        assert guard.trouble() == []
        assert small.pool.get_num_free_blocks() == len(small.pool.blocks) - 1
        assert small.scheduler.requests == {}
        assert "build_connector_meta" in vars(small.scheduler.connector)
        for turn in range(20):
            small.serve([verified.prompt(turn, 9)], 1, f"over {turn}")
    assert set(vars(small.scheduler.connector)) == own


@STEPS
def test_another_adapters_kv_from_the_tier_is_told(small, store, adapters, wait_steps):
    """A tier that forgets the adapter in its keys brings unchanged bytes of the wrong model. With the adapter in its
    keys, and for the one who stored it, all is well."""
    a, b, tokens = (
        {"lora_request": adapters["a"]},
        {"lora_request": adapters["b"]},
        verified.prompt("tier", 3 * BLOCK + 7),
    )
    with guarded.guard(small, **{**QUIET, "control": "write"}) as guard:
        verified.teach(small)
        store.wait_steps = wait_steps
        for kept in (True, False):
            store.blocks.clear()
            store.adapters = kept
            for name, who in (("stores", a), ("well", a), ("other", b)):
                small.scheduler.reset_prefix_cache()
                verified.begin(small, 2, {f"{name} {kept}": tokens}, **who)
                (answer,) = verified.verify(small, f"{name} {kept}")
                verified.finish(small)
                assert answer.verdict == ("differs" if name == "other" and not kept else "same"), answer.table()
        assert told(guard) == [(0, 0, "other False", "brought")]
        assert f"an arrival brought its first {3 * BLOCK} tokens" in guard.findings.violations[0].detail
        # What it left in the prefix cache is wrong for whoever hits it.
        (left,) = parked.verify(small, "other False")
        assert (left.verdict, left.tokens) == ("differs", 6 * BLOCK)


def test_a_tier_of_other_weights_is_told(small, store):
    """A weight changes, the prefix cache is given up and the tier is kept: what it brings behind a hit is told, from
    the first position on, and what is computed anew is well."""
    tokens = verified.prompt("weights", 3 * BLOCK + 7)
    with guarded.guard(small, **QUIET) as guard:
        verified.teach(small)
        verified.begin(small, 2, {"before": tokens})
        verified.finish(small)
        with verified.scaled(small, "model.layers.0.post_attention_layernorm.weight", 1.05):
            small.scheduler.reset_prefix_cache()
            verified.begin(small, 2, {"brought": tokens, "fresh": verified.prompt("fresh")})
            answers = verified.verify(small, "brought", "fresh")
            verified.finish(small)
        assert [one.verdict for one in answers] == ["differs", "same"]
        assert told(guard) == [(1, 0, "brought", "brought")]


def test_what_the_tier_brings_behind_a_hit_is_named(small, store):
    """One block of the middle is another request's: told at its first position, as an arrival."""
    tokens, other = verified.prompt("middle", 3 * BLOCK + 7), verified.prompt("other", 3 * BLOCK + 7)
    with guarded.guard(small, **QUIET) as guard:
        verified.teach(small)
        for name, one in (("first", tokens), ("second", other)):
            verified.begin(small, 2, {name: one})
            verified.finish(small)
        wrong = store.blocks[tuple(other[: 2 * BLOCK])]
        store.fault = lambda prefix, name, data: wrong[name] if prefix == tuple(tokens[: 2 * BLOCK]) else data
        small.scheduler.reset_prefix_cache()
        # The first block is in the prefix cache.
        verified.begin(small, 2, {"head": [*tokens[:BLOCK], 7, 8]})
        verified.finish(small)
        pairs = verified.compared()
        verified.begin(small, 2, {"ill": tokens})
        (answer,) = verified.verify(small, "ill")
        verified.finish(small)
        assert answer.verdict == "differs"
        assert told(guard) == [(0, BLOCK, "ill", "brought")]
        assert pairs[0].touches == (Touch("hit", BLOCK), Touch("arrival", 3 * BLOCK))


def test_loads_that_fail_are_computed_by_the_request_itself(small, store):
    """vLLM takes back the tokens of blocks that could not be brought: none of them is compared before. If it runs
    ahead it does so for loads of the steps before alone."""
    asked = [verified.prompt(f"failing {i}", 4 * BLOCK + 3) for i in range(3)]
    ahead = small.core.vllm_config.scheduler_config.async_scheduling
    for wait_steps in (3,) if ahead else (0, 3):
        store.__init__()
        with guarded.guard(small, **QUIET, recompute="100%") as guard:
            first = small.serve(asked, 40, "first")
            store.wait_steps = wait_steps
            for turn in range(4):
                small.scheduler.reset_prefix_cache()
                store.failing = {tuple(one[: (2 + turn % 2) * BLOCK]) for one in asked[:2]}
                assert small.serve(asked, 40, f"again {turn}") == first
            (session,) = HOOKS.sessions
            assert len(session.recomputed.answers) > 8
            assert {answer.verdict for answer in session.recomputed.answers} == {"same"}
            assert [str(v) for v in guard.findings.violations] == []


def test_where_others_store_nothing_is_computed_again(small, store):
    """Their KV may be rounded otherwise: the reason is the answer, and the connector keeps its own functions."""
    with guarded.guard(small, **{**QUIET, "ledger_private": ""}, recompute="100%") as guard:
        verified.begin(small, 2, {"asked": verified.prompt("asked")})
        (answer,) = verified.verify(small, "asked")
        verified.finish(small)
        assert (answer.verdict, "unless CANARY_LEDGER_PRIVATE names it" in answer.reason) == ("unjudged", True)
        assert guard.findings.violations == []


@STEPS
def test_where_others_turn_out_to_store_a_difference_is_not_told(small, store, wait_steps):
    """The store is named as private, and another engine, which keeps its KV in fewer bits, has stored there: once a
    prefix comes that this engine never kept, neither that request nor a hit of it, nor what it left, is blamed. What
    this engine has stored, and computes, is the same before and after."""
    foreign, own = verified.prompt("foreign", 3 * BLOCK + 7), verified.prompt("own", 3 * BLOCK + 7)
    small.renew()
    verified.begin(small, 2, {"another engine": foreign})
    verified.finish(small)
    store.blocks = {
        prefix: {name: kept.bfloat16().float() for name, kept in layers.items()}
        for prefix, layers in store.blocks.items()
    }
    store.wait_steps = wait_steps
    alone = {name: value for name, value in QUIET.items() if name not in ("bytes", "ledger")}

    def verdicts(**prompts):
        small.scheduler.reset_prefix_cache()
        verified.begin(small, 2, prompts)
        answers = verified.verify(small, *prompts)
        verified.finish(small)
        return [one.verdict for one in answers], {one.reason for one in answers if one.reason}

    with guarded.guard(small, **alone, control="write") as guard:
        verified.teach(small)
        assert verdicts(first=own) == (["same"], set())
        assert verdicts(again=own) == (["same"], set())
        assert [event.name for event in guard.findings.events if event.name == "ledger_shared"] == []
        loads = store.loads
        found, reasons = verdicts(brought=foreign, fresh=verified.prompt("fresh"))
        assert (found, store.loads) == (["unjudged", "same"], loads + 3)
        (reason,) = reasons
        assert "HostStore" in reason
        assert "others store" in reason
        (left,) = parked.verify(small, "brought")
        assert (left.verdict, left.reason) == ("unjudged", reason)
        # A hit of what was brought, without a load.
        verified.begin(small, 2, {"hit": foreign})
        (answer,) = verified.verify(small, "hit")
        verified.finish(small)
        assert (answer.verdict, answer.reason) == ("unjudged", reason)
        assert store.loads == loads + 3
        assert verdicts(later=own) == (["same"], set())
        assert told(guard) == []
        assert [event.name for event in guard.findings.events if event.name == "ledger_shared"] == ["ledger_shared"]
        assert guard.canary.stats()["recompute_refused"] == 3


def files(folder):
    """What a store on a disk has, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("several", [False, True], ids=["alone", "among several"])
def test_vllms_own_store_on_a_disk_stays_what_it_was(folder, several, monkeypatch, tmp_path):
    """`ExampleConnector` saves layer by layer, while the forward runs: every verdict is the same, also of what was
    brought, and answers and all files are as without Canary."""
    # vLLM has one connector for all engines of a process.
    monkeypatch.setattr("vllm.distributed.kv_transfer.kv_transfer_state._KV_CONNECTOR_AGENT", None)
    store = tmp_path / "store"
    connector: dict[str, Any] = dict(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(store)},
    )
    if several:
        extra = {"connectors": [connector]}
        connector = dict(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=extra)
    # It saves a prompt with the first chunk, computed or not.
    options = dict(max_num_batched_tokens=2048, max_num_seqs=12, num_gpu_blocks_override=64)
    small = SmallEngine(folder, load_format="auto", kv_transfer_config=connector, **options)
    asked = [[verified.prompt(f"{turn} {i}", 60 + i * (turn % 2)) for i in range(4)] for turn in range(4)]

    def served():
        answers = []
        for again, turn in enumerate([0, 0, 1, 1, 2, 2, 3, 3]):
            small.scheduler.reset_prefix_cache()
            answers.append(small.serve(asked[turn], 40, f"{again}"))
        return answers

    small.renew()
    plain, before = served(), files(store)
    shutil.rmtree(store)
    quiet = {**QUIET, "ledger_private": connector["kv_connector"]}
    with guarded.guard(small, **quiet, recompute="100%") as guard:
        pairs = verified.compared()
        assert served() == plain
        (session,) = HOOKS.sessions
        assert len(session.recomputed.answers) > 15
        assert {answer.verdict for answer in session.recomputed.answers} == {"same"}
        assert sum(any(touch.what == "arrival" for touch in pair.touches) for pair in pairs) > 10
        assert files(store) == before != {}
        assert guard.trouble() == []
    small.end()
