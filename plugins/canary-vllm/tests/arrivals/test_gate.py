"""``CANARY_ON_VIOLATION=protect`` and a connector: what it brings wrong is served to nobody. The real vLLM, and a
connector that is not its own; what it brings is broken in its store, from outside."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from vllm_on_cpu import guarded
from vllm_on_cpu.engine import BLOCK, SmallEngine
from vllm_on_cpu.scripts import told_by

from canary_core import Kind

pytestmark = pytest.mark.timeout(600)
CONNECTOR = dict(kv_connector="HostStore", kv_connector_module_path="vllm_on_cpu.host_store", kv_role="kv_both")
DRAW = random.Random("gate")
PROMPT, OTHER, BESIDE = ([DRAW.randrange(3, 500) for _ in range(3 * BLOCK + 7)] for _ in range(3))
STEPS = pytest.mark.parametrize("wait_steps", [0, 3], ids=["while the forward runs", "steps before"])
POLICY = pytest.mark.parametrize("policy", ["recompute", "fail"])


def attentive(model: str = "llama", connector: Any = CONNECTOR, **options: Any) -> SmallEngine:
    """vLLM with a connector, its own prefix cache, and a model whose answers depend on all of the prompt."""
    engine = SmallEngine(model, kv_transfer_config=connector, **options)
    with torch.no_grad():
        for layer in engine.runner.get_model().model.layers:
            layer.input_layernorm.weight.fill_(1000)
    return engine


@pytest.fixture(scope="module")
def small() -> Iterator[SmallEngine]:
    """One engine for most tests."""
    made = attentive()
    yield made
    made.end()


@pytest.fixture(scope="module")
def ahead() -> Iterator[SmallEngine]:
    """The same with asynchronous scheduling."""
    made = attentive(async_scheduling=True)
    yield made
    made.end()


@pytest.fixture
def store() -> Any:
    """What the connector has stored: nothing."""
    from vllm_on_cpu import host_store

    host_store.STORE.__init__()
    return host_store.STORE


@contextmanager
def guard(engine: SmallEngine, policy: str, **settings: Any) -> Iterator[guarded.Guarded]:
    """With vLLM's own policy for blocks that are not loaded. Only this process stores with the connector."""
    engine.core.vllm_config.kv_transfer_config.kv_load_failure_policy = policy
    given = {"on_violation": "protect", "read_check": 0, "ledger_private": "HostStore", **settings}
    with guarded.guard(engine, **given) as found:
        yield found


def serve(engine: SmallEngine, prompts: list[list[int]], name: str) -> list[list[int]]:
    """Answers, which must come. What vLLM's own cache has is given up before, so that the connector is asked."""
    engine.scheduler.reset_prefix_cache()
    names = [f"{name}-{i}" for i in range(len(prompts))]
    for one, prompt in zip(names, prompts, strict=True):
        engine.submit(one, prompt, 6)
    for _ in range(200):
        if not engine.step():
            return [engine.answers[one] for one in names]
    pytest.fail("requests never end")


def a_bit(prefix: Any, name: str, data: torch.Tensor) -> torch.Tensor:
    """One bit of the second block, of the first layer's V."""
    if len(prefix) == 2 * BLOCK and ".0." in name:
        data.view(-1).view(torch.int32)[-3] ^= 1 << 22
    return data


def flipped(prefix: Any, name: str, data: torch.Tensor) -> torch.Tensor:
    """The same bit of each value there: the sign."""
    if len(prefix) == 2 * BLOCK and ".0." in name:
        data.view(-1)[data.numel() // 2 :] *= -1
    return data


def untouched(prefix: Any, name: str, data: torch.Tensor) -> torch.Tensor:
    """Nothing is wrong."""
    return data


def halved(prefix: Any, name: str, data: torch.Tensor) -> torch.Tensor:
    """Half of each block's V comes, and zeros for the rest."""
    data.view(-1)[-data.numel() // 4 :] = 0
    return data


def anothers(prefix: Any, name: str, data: torch.Tensor) -> torch.Tensor:
    """The first block is that of another prompt."""
    from vllm_on_cpu import host_store

    return host_store.STORE.blocks[tuple(OTHER[:BLOCK])][name] if len(prefix) == BLOCK else data


FAULTS = {"a bit": a_bit, "flipped": flipped, "halved": halved, "another's": anothers, "nothing": lambda *_: None}


def told(found: guarded.Guarded, name: str) -> list[str]:
    """The requests of these events."""
    return [event.fields["request"] for event in found.findings.told(name)]


@pytest.mark.parametrize("fault", FAULTS)
@STEPS
def test_a_wrong_block_is_computed_again_or_its_request_fails(small, store, fault, wait_steps):
    """Whatever is wrong with it, and however often it would come: it is loaded once. By default the answer is wrong,
    and told. What is right in the same store is served as before."""
    for policy, value in (("recompute", "report"), ("recompute", "protect"), ("fail", "protect")):
        store.__init__()
        with guard(small, policy, on_violation=value) as found:
            right, _, beside = serve(small, [PROMPT, OTHER, BESIDE], "first")
            store.wait_steps, store.fault = wait_steps, FAULTS[fault]
            before = store.loads
            (ill,) = serve(small, [PROMPT], "ill")
            assert store.loads == before + 3
            assert found.findings.violations
            if value == "report":
                # A single bit may not be enough to change a token.
                assert ill != right or fault == "a bit"
                continue
            assert found.canary.stats()["gated_blocks"] > 0
            store.fault = None
            assert serve(small, [BESIDE], "well") == [beside]
            assert {v.kind for v in found.findings.violations} == {Kind.ARRIVAL}
            assert told(found, "aborted") == []
            if policy == "recompute":
                assert ill == right
                assert told(found, "recomputed") == ["ill-0"]
            else:
                assert (ill, small.ends["ill-0"]) == ([], "error")
                assert told(found, "recomputed") == []
            assert serve(small, [PROMPT], "after") == [right]


@STEPS
def test_clean_loads_are_left_alone(small, store, wait_steps):
    """Hundreds of blocks come, also for whole prompts, and beside hits: nothing is computed again, ended or evicted."""
    store.whole = True
    asked = [PROMPT[: 3 * BLOCK], PROMPT, OTHER, BESIDE[: 2 * BLOCK] + OTHER[:9]]
    with guard(small, "fail") as found:
        first = serve(small, asked, "first")
        store.wait_steps = wait_steps
        for turn in range(20):
            assert serve(small, asked, f"again {turn}") == first
            assert [small.serve([asked[turn % 4]], 6, f"hit {turn}")] == [[first[turn % 4]]]
        assert store.loads > 100
        assert found.trouble() == []
        stats = found.canary.stats()
        assert stats["ledger_matched"] == stats["ledger_compared"] > 100
        assert "gated_blocks" not in stats


@STEPS
def test_what_the_connector_could_not_load_still_counts(small, store, wait_steps):
    """Its own word and Canary's are told together: each request is right, and both blocks are computed again."""
    with guard(small, "recompute") as found:
        first = serve(small, [PROMPT, OTHER], "first")
        store.wait_steps = wait_steps
        store.failing, store.fault = {tuple(OTHER[: 2 * BLOCK])}, flipped
        assert serve(small, [PROMPT, OTHER], "ill") == first
        assert {v.request for v in found.findings.violations} == {"ill-0"}
        assert {*told(found, "recomputed")} == {"ill-0", "ill-1"}
        assert told(found, "aborted") == []


@POLICY
def test_a_wrong_block_is_served_to_nobody_who_shares_it(small, store, policy):
    """Two requests begin in the step in which it comes, one of them by a hit on it; others go on."""
    with guard(small, policy) as found:
        fork = PROMPT[: 2 * BLOCK] + OTHER[:11]
        right, forked, beside = serve(small, [PROMPT, fork, BESIDE], "first")
        small.scheduler.reset_prefix_cache()
        small.submit("beside", BESIDE, 12)
        small.step()
        store.fault = flipped
        small.submit("ill", PROMPT[: 2 * BLOCK + 3], 6)
        small.submit("shares", fork, 6)
        while small.step():
            pass
        assert small.answers["beside"][:6] == beside
        assert small.answers["shares"] in ([], forked)
        ends = {small.ends[name] for name in ("ill", "shares")}
        assert ends == ({"length"} if policy == "recompute" else {"error"})
        assert len(found.findings.violations) == 1
        store.fault = None
        assert serve(small, [PROMPT, fork], "after") == [right, forked]


@STEPS
@POLICY
def test_the_next_step_may_be_under_way(ahead, store, wait_steps, policy):
    """Asynchronous scheduling, in which vLLM's own way to compute a running request again is wrong."""
    with guard(ahead, policy) as found:
        right, _, beside = serve(ahead, [PROMPT, OTHER, BESIDE], "first")
        store.wait_steps = wait_steps
        store.fault = lambda prefix, *rest: (flipped if prefix[0] == PROMPT[0] else untouched)(prefix, *rest)
        ill, well = serve(ahead, [PROMPT, BESIDE], "ill")
        assert well == beside
        if policy == "recompute":
            assert (ill, told(found, "recomputed")) == (right, ["ill-0"])
        else:
            assert (ill, ahead.ends["ill-0"]) == ([], "error")
        assert told(found, "aborted") == []
        store.fault = None
        assert serve(ahead, [PROMPT, BESIDE], "after") == [right, beside]


def test_a_verdict_may_come_when_the_next_step_has_been_issued(ahead, store, monkeypatch):
    """As on a GPU with asynchronous scheduling: nothing is on the host before vLLM has waited for the step's tokens,
    too late for the output's own word. The tokens are given to nobody yet, so the request is computed again."""
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

    from canary_core.runtime.host_copy import HostCopy

    waited, execute = [True], ahead.core.model_executor.execute_model
    monkeypatch.setattr(HostCopy, "arrived", lambda _: waited[0])
    given = AsyncGPUModelRunnerOutput.get_output
    monkeypatch.setattr(AsyncGPUModelRunnerOutput, "get_output", lambda self: (given(self), waited.insert(0, True))[0])
    with guard(ahead, "recompute") as found:
        right, beside = serve(ahead, [PROMPT, BESIDE], "first")
        issue = lambda *args, **more: (waited.insert(0, False), execute(*args, **more))[1]  # noqa: E731
        monkeypatch.setattr(ahead.core.model_executor, "execute_model", issue)
        store.fault = lambda prefix, *rest: (flipped if prefix[0] == PROMPT[0] else untouched)(prefix, *rest)
        assert serve(ahead, [PROMPT, BESIDE], "ill") == [right, beside]
        assert (told(found, "recomputed"), told(found, "aborted")) == (["ill-0"], [])
        assert "gated_blocks" not in found.canary.stats()


def test_a_load_for_several_groups_is_acted_on_as_other_findings(store, monkeypatch):
    """Full and sliding layers with blocks of their own, for which vLLM takes no block numbers from a connector: what is
    wrong in either is computed again before a token is given out, whatever vLLM's own policy."""
    # vLLM has one connector for all engines of a process.
    monkeypatch.setattr("vllm.distributed.kv_transfer.kv_transfer_state._KV_CONNECTOR_AGENT", None)
    names = dict(kv_connector="GroupedStore", kv_connector_module_path="vllm_on_cpu.grouped_store")
    options = dict(disable_hybrid_kv_cache_manager=False, num_gpu_blocks_override=48)
    engine = attentive("gemma3", {**CONNECTOR, **names}, **options)
    assert len(engine.runner.kv_cache_config.kv_cache_groups) > 1
    for value, layer, steps in (("report", 3, 0), ("protect", 3, 0), ("protect", 3, 3), ("protect", 0, 0)):
        store.__init__()
        with guard(engine, "fail", on_violation=value, ledger_private="GroupedStore") as found:
            right, beside = serve(engine, [PROMPT, BESIDE], "first")
            store.wait_steps = steps
            wrong = lambda prefix, name, data: data * -1e4 if f".{layer}." in name else data  # noqa: B023, E731
            store.fault = lambda prefix, *rest: (wrong if prefix[0] == PROMPT[0] else untouched)(prefix, *rest)  # noqa: B023
            ill, well = serve(engine, [PROMPT, BESIDE], "ill")
            assert well == beside
            assert {(v.kind, v.request) for v in found.findings.violations} == {(Kind.ARRIVAL, "ill-0")}
            assert "gated_blocks" not in found.canary.stats()
            if value == "report":
                assert ill != right
                continue
            assert (ill, told(found, "recomputed"), told(found, "aborted")) == (right, ["ill-0"], [])
            store.fault = None
            assert serve(engine, [PROMPT, BESIDE], "after") == [right, beside]


@pytest.mark.xdist_group("processes")
@pytest.mark.beyond_ci("the tests of one process here, and test_protection: ranks in processes of their own")
@pytest.mark.parametrize(("rank", "steps", "policy"), [(1, 0, "recompute"), (1, 3, "recompute"), (0, 0, "fail")])
def test_what_one_rank_was_brought_is_served_by_none(rank, steps, policy):
    """Two tensor-parallel workers and the scheduler, each in a process of its own: every second load has a wrong block
    in the shard of one rank, whose word vLLM joins with the other's."""
    told = told_by(
        "gate_ranks_script", str(rank), str(steps), policy, "4",
        plugins="vllm", CANARY_ON_VIOLATION="protect", CANARY_LEDGER_PRIVATE="RankedStore",
    )  # fmt: skip
    ends = {"right": 4, "error": 0} if policy == "recompute" else {"right": 2, "error": 2}
    assert told == {"asked": 4, "wrong": 0, **ends, "ranks": [2 * (rank == 0), 2 * (rank == 1)]}


@pytest.mark.xdist_group("processes")
@pytest.mark.takes_turns("test_a_verdict_may_come_when_the_next_step_has_been_issued, in one process")
def test_a_verdict_of_another_process_comes_with_the_tokens():
    """As on a GPU with asynchronous scheduling: a rank knows what its connector has brought when it knows the tokens,
    and the scheduler, in a process of its own, gives these out before the rank's next step. No answer is wrong."""
    settings = dict(CANARY_ON_VIOLATION="protect", CANARY_LEDGER_PRIVATE="RankedStore")
    told = told_by("gate_ranks_script", "1", "0", "recompute", "4", "late", plugins="vllm", **settings)
    assert told == {"asked": 4, "right": 4, "wrong": 0, "error": 0, "ranks": [0, 0]}
