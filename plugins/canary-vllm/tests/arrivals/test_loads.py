"""Any connector on a real vLLM: what it brings back right is silent, what it brings back wrong is told, naming it."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from vllm_on_cpu.scripts import told_by

from canary_core import Canary, CanaryConfig, Kind, Patches, hook_manager
from canary_core.testing import Findings

pytestmark = pytest.mark.timeout(600)

CONNECTOR = dict(
    kv_connector="HostStore", kv_connector_module_path="vllm_on_cpu.host_store", kv_role="kv_both",
    kv_load_failure_policy="recompute",
)  # fmt: skip
SIZE = 32


ALONE = pytest.mark.takes_turns("the same beside vLLM's own prefix cache", unit="loads without a prefix cache")


@pytest.fixture(scope="module", params=[pytest.param("no prefix cache", marks=ALONE), "prefix cache"])
def engine(request) -> Any:
    """vLLM with a connector that is not its own; it alone brings KV back, or beside vLLM's own prefix cache."""
    from vllm_on_cpu.engine import SmallEngine

    caching = request.param == "prefix cache"
    made = SmallEngine("llama", kv_transfer_config=CONNECTOR, enable_prefix_caching=caching)
    yield made
    made.end()


@pytest.fixture
def store() -> Any:
    """What the connector has stored: nothing."""
    from vllm_on_cpu import host_store

    host_store.STORE.__init__()
    return host_store.STORE


class Guarded:
    """``engine`` while it is guarded."""

    def __init__(self, engine: Any, findings: Findings) -> None:
        self.engine, self.findings = engine, findings

    @property
    def canary(self) -> Canary:
        """That of the engine's runner."""
        from canary_vllm.hooks import HOOKS

        (session,) = HOOKS.sessions
        return session.canary

    def serve(self, prompts: list[list[int]], name: str, **more: Any) -> list[list[int]]:
        """Answers; what vLLM's own cache has is given up, so that the connector is asked."""
        answers = self.engine.serve(prompts, 6, name, **more)
        self.engine.scheduler.reset_prefix_cache()
        return answers

    def found(self) -> list[tuple[Any, ...]]:
        """All findings by what a user must know."""
        self.canary.drain()
        return [(v.kind, v.layer, v.half, v.position, v.origin) for v in self.findings.violations]

    def counts(self, *names: str) -> list[int]:
        """Counters of the ledger."""
        self.canary.drain()
        return [self.canary.stats().get(f"ledger_{name}", 0) for name in names]


@contextmanager
def guard(engine: Any, **settings: Any) -> Iterator[Guarded]:
    """Guards ``engine`` by nothing but the plugin's hooks. Only this process stores with its connector."""
    from canary_vllm.hooks import HOOKS

    findings = Findings()
    hook_manager().register(findings)
    given = {"read_check": -1, "stats_interval": 0, "ledger_private": "HostStore", **settings}
    try:
        HOOKS.start(CanaryConfig.load(**given))
        engine.renew()
        yield Guarded(engine, findings)
    finally:
        HOOKS.stop()
        hook_manager().unregister(findings)


def prompts(seed: int, count: int = 4) -> list[list[int]]:
    """Some share their first two blocks."""
    draw = random.Random(seed)
    head = [draw.randrange(3, 500) for _ in range(2 * SIZE)]
    return [
        (head if i % 2 else []) + [draw.randrange(3, 500) for _ in range(draw.randrange(SIZE, 3 * SIZE))]
        for i in range(count)
    ]


@pytest.mark.parametrize("wait_steps", [0, 3], ids=["while the forward runs", "steps before"])
def test_clean_reloads_are_silent(engine, store, wait_steps):
    """Hundreds of blocks come back as they were stored: each is compared, none is told, and the answers stay."""
    asked = prompts(1)
    with guard(engine) as guarded:
        store.wait_steps = wait_steps
        first = guarded.serve(asked, "first")
        for turn in range(25):
            assert guarded.serve(asked, f"again {turn}") == first
        assert guarded.found() == []
        assert [e.name for e in guarded.findings.events if e.level in ("warning", "error")] == []
        matched, compared, unclear, unknown = guarded.counts("matched", "compared", "unclear", "unknown")
        assert matched == compared == store.loads > 100
        assert (unclear, unknown) == (0, 0)
        assert guarded.canary.stats()["unknown_slots"] == 0


@pytest.mark.parametrize("wait_steps", [0, 3], ids=["while the forward runs", "steps before"])
def test_clean_reloads_of_salted_requests_are_silent(engine, store, wait_steps):
    """A request that waits for its KV has its salt from then on, not only once it is scheduled."""
    asked = prompts(1)
    with guard(engine) as guarded:
        store.wait_steps = wait_steps
        first = guarded.serve(asked, "first", cache_salt="bob's")
        for turn in range(3):
            assert guarded.serve(asked, f"again {turn}", cache_salt="bob's") == first
        assert guarded.found() == []
        matched, unknown = guarded.counts("matched", "unknown")
        assert matched > 0
        assert unknown == 0


@pytest.mark.parametrize("wait_steps", [0, 3], ids=["while the forward runs", "steps before"])
def test_what_comes_back_wrong_is_told(engine, store, wait_steps):
    """A flipped bit in what is stored, with layer and half; a layer that is not copied; another prefix's block."""
    asked = prompts(2, count=1)
    with guard(engine) as guarded:
        guarded.serve(asked, "first")
        store.wait_steps = wait_steps
        block = tuple(asked[0][:SIZE])
        layer = next(name for name in store.blocks[block] if ".1." in name)

        def flipped(prefix, name, data):
            if (prefix, name) == (block, layer):
                # CPU attention has K of a block before its V.
                data.view(-1).view(guarded_bits(data))[-3] ^= 4
            return data

        store.fault = flipped
        guarded.serve(asked, "flipped")
        assert guarded.found() == [(Kind.ARRIVAL, 1, "v", 0, "HostStore")]
        store.fault = lambda prefix, name, data: None if (prefix, name) == (block, layer) else data
        guarded.serve(asked, "left out")
        guarded.found()
        told = guarded.findings.violations[-1]
        assert (told.kind, told.position, told.origin) == (Kind.ARRIVAL, 0, "HostStore")
        assert told.detail.endswith("layer 1 K and V")
        other = prompts(3, count=1)
        store.fault = None
        guarded.serve(other, "other")
        wrong = store.blocks[tuple(other[0][:SIZE])]
        store.fault = lambda prefix, name, data: wrong[name] if prefix == block else data
        guarded.serve(asked, "another's")
        guarded.found()
        told = guarded.findings.violations[-1]
        assert told.request.startswith("another's")
        assert told.detail == "positions 0 to 31; these are positions 0 to 31 of other-0"
        assert {v.kind for v in guarded.findings.violations} == {Kind.ARRIVAL}


def test_stores_are_not_looked_at_beside_a_connector(engine, store):
    """vLLM waits for what a connector loads into a layer after it has stored there, so with one nobody can tell that
    nothing else is written to what was stored: no store is looked at."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    patches, order = Patches(), []
    with guard(engine, store_check=True) as guarded:
        layer = next(iter(engine.runner.compilation_config.static_forward_context.values()))
        assert not hasattr(layer.impl.do_kv_cache_update, "__wrapped__")
        patches.follow(layer.impl, "do_kv_cache_update", lambda *_: order.append("stored"))
        patches.follow(get_kv_transfer_group(), "wait_for_layer_load", lambda _, name: order.append(name))
        guarded.serve(prompts(1), "first")
        patches.undo()
        assert guarded.found() == []
        assert "noted_stores" not in guarded.canary.stats()
    assert order[:2] == ["stored", layer.layer_name]


def guarded_bits(data):
    """An integer type as wide as the elements of ``data``."""
    import torch

    return {2: torch.int16, 4: torch.int32}[data.element_size()]


@pytest.mark.parametrize("wait_steps", [0, 3], ids=["while the forward runs", "steps before"])
def test_loads_that_fail_are_not_judged(engine, store, wait_steps):
    """The connector says which blocks it could not bring; vLLM computes them again. Whatever is there meanwhile is
    nobody's word."""
    asked = prompts(4, count=2)
    with guard(engine) as guarded:
        first = guarded.serve(asked, "first")
        store.wait_steps = wait_steps
        store.failing = {tuple(asked[1][: 2 * SIZE])}
        assert guarded.serve(asked, "failing") == first
        store.failing = set()
        assert guarded.serve(asked, "again") == first
        assert guarded.found() == []
        assert guarded.counts("matched")[0] > 0


def test_a_full_hit_computes_its_last_token_again(engine, store):
    """All of a prompt comes back, and the forward writes the last token to the block that came: no finding, neither
    then nor when it comes back once more."""
    asked = [prompt[: len(prompt) // SIZE * SIZE] for prompt in prompts(5)]
    with guard(engine) as guarded:
        first = guarded.serve(asked, "first")
        store.wait_steps, store.whole = 2, True
        for turn in range(4):
            assert guarded.serve(asked, f"again {turn}") == first
        assert guarded.found() == []
        assert guarded.counts("matched")[0] > 20


def test_preempted_requests_come_back(engine, store):
    """More requests than the pool has blocks for: what is computed again may be loaded instead, in the middle of an
    answer."""
    asked = [[*prompt, *prompt[:SIZE]] for prompt in prompts(6, count=8)]
    with guard(engine) as guarded:
        for turn in range(3):
            engine.serve(asked, 40, f"crowd {turn}")
            store.wait_steps = turn
        assert guarded.found() == []
        assert guarded.counts("matched")[0] > 10
        assert guarded.counts("unclear", "differing") == [0, 0]


def test_a_ledger_that_has_evicted_everything_judges_again_once_all_is_reset(engine, store):
    """vLLM's own cache and the connector give up their KV with one call: what the ledger has forgotten can't come back.
    Neither of them alone says so."""
    asked = prompts(8)
    with guard(engine, ledger=512) as guarded:
        guarded.serve(asked, "first")
        store.fault = lambda prefix, name, data: data * 2
        guarded.serve(asked, "doubled")
        assert guarded.found() == []
        assert guarded.counts("emptied") == [0]
        unknown, evicted = guarded.counts("unknown", "evicted")
        assert min(unknown, evicted) > 0
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        store.fault = None
        short = [prompt[: SIZE + 1] for prompt in asked[:1]]
        guarded.serve(short, "anew")
        assert guarded.counts("emptied") == [1]
        store.fault = lambda prefix, name, data: data * 2
        guarded.serve(short, "doubled again")
        assert {kind for kind, *_ in guarded.found()} == {Kind.ARRIVAL}


def test_a_store_that_others_fill_proves_nothing(engine, store):
    """Of a connector that the plugin does not know nobody can say that this engine alone stores with it: differences
    are counted, unless the user says so."""
    asked = prompts(7, count=1)
    with guard(engine, ledger_private="") as guarded:
        guarded.serve(asked, "first")
        store.fault = lambda prefix, name, data: data * 2
        guarded.serve(asked, "doubled")
        assert guarded.found() == []
        differing, unknown = guarded.counts("differing", "unknown")
        assert differing == 0
        assert unknown > 0


@pytest.mark.parametrize("wait_steps", [0, 3], ids=["while the forward runs", "steps before"])
def test_what_is_certain_is_told_of_every_connector(engine, store, wait_steps):
    """Nobody named the connector, so others may store with it. All the same: a load that brings nothing, one that
    leaves out a layer, and one that brings another sequence's blocks, are told as that; loads that are right, of the
    same blocks or others, are not."""
    alice, bob = prompts(8, count=3)[::2]
    with guard(engine, ledger_private="") as guarded:
        first = guarded.serve([alice], "alice")
        guarded.serve([bob], "bob")
        store.wait_steps = wait_steps
        for turn in range(4):
            assert guarded.serve([alice], f"alice again {turn}") == first
            guarded.serve([bob], f"bob again {turn}")
        assert guarded.found() == []
        store.fault = lambda prefix, name, data: None
        guarded.serve([alice], "empty-handed")
        told = arrivals(guarded)
        assert {(v.kind, v.rule, v.origin, v.request) for v in told} == {
            (Kind.ARRIVAL, "nothing_came", "HostStore", "empty-handed-0")
        }
        assert "nothing came: HostStore is said to have brought page" in told[0].explanation
        assert told[0].stored_request is not None
        store.fault = lambda prefix, name, data: None if ".1." in name else data
        guarded.serve([bob], "without a layer")
        told = arrivals(guarded)
        assert {(v.rule, v.layer, v.sources) for v in told} == {("left_out", None, ("k.1/0", "k.1/1", "v.1"))}
        assert told[0].detail.endswith("3 of 6 sources are as before the load: layer 1 K and V")
        store.fault = lambda prefix, name, data: store.blocks[tuple(bob[:SIZE])][name]
        guarded.serve([alice], "with bob's")
        told = arrivals(guarded)
        assert {(v.rule, v.request, v.stored_position) for v in told} == {("another_sequence", "with bob's-0", 0)}
        assert told[0].explanation.endswith("positions 0 to 31; these are positions 0 to 31 of bob-0.")
        store.fault = None
        assert guarded.serve([alice], "alice at last") == first
        assert guarded.found() == []


def arrivals(guarded: Guarded) -> list[Any]:
    """The findings since the last call."""
    guarded.canary.drain()
    told, guarded.findings.violations = guarded.findings.violations, []
    return told


@pytest.mark.xdist_group("processes")
@pytest.mark.takes_turns("the V1 runner, in one process")
def test_the_v2_runner_is_told_as_well():
    """In a process of its own, with Triton's interpreter: clean reloads are silent, a flip is named, whether blocks
    come while the forward runs or steps before. With protect an answer is computed from what was found in neither."""
    told = told_by("v2_loads_script")
    assert told["runner"] == "vllm.v1.worker.gpu.model_runner"
    assert told["trouble"] == []
    assert all(told["same"])
    assert told["matched"] > told["loads"] > 10
    assert told["found"] == [["ARRIVAL", 1, "v", 0, "HostStore"]] * 2
    assert told["wrong"] == [False, False]
    assert told["right"] == [True, True]
    assert told["recomputed"] == ["ill0-0", "ill0-1", "ill2-0", "ill2-1"]


def test_kv_of_older_weights_that_a_connector_brings_is_told_with_the_update(engine, store):
    """The weights are loaded again, and nobody empties the connector's store, whose keys have none of it. What the same
    weights have stored comes back in silence."""
    asked = [[(11 * i) % 400 + 3 for i in range(3 * SIZE + 5)]]
    model = engine.runner.get_model()
    before = model.model.embed_tokens.weight.detach()[: model.config.vocab_size].clone()
    with guard(engine) as guarded:
        guarded.serve(asked, "alice")
        guarded.serve(asked, "again")
        assert guarded.found() == []
        try:
            model.load_weights([("model.embed_tokens.weight", 1.5 * before)])
            guarded.serve(asked, "bob")
        finally:
            model.load_weights([("model.embed_tokens.weight", before)])
        guarded.canary.drain()
        found = guarded.findings.violations
        assert {(v.kind, v.rule, v.stored_request) for v in found} == {(Kind.ARRIVAL, "another_identity", "alice-0")}
        assert found[0].identity == "the weights of change 1 (load_weights)"
        assert found[0].stored_identity == "the weights of the start"


@pytest.mark.xdist_group("processes")
@pytest.mark.takes_turns("loads of engines without drafts, in one process")
def test_draft_layers_that_a_tier_leaves_out_are_told():
    """A connector that brings the draft model's layers, too, is silent, whether loads run beside the forward or before
    it; one that leaves them as they were is told, in the draft model's region alone."""
    told = told_by("draft_loads_script")
    assert told["regions"] == ["draft", "full"]
    assert told["loads"] > 10
    assert told["same"] == [True, True]
    assert told["trouble"] == []
    assert told["found"] == [[["ARRIVAL", "draft", "nothing_came", "HostStore"]]] * 2
