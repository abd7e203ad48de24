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

pytestmark = pytest.mark.timeout(600)
CONNECTOR = dict(kv_connector="HostStore", kv_connector_module_path="vllm_on_cpu.host_store", kv_role="kv_both")
DRAW = random.Random("gate")
PROMPT, OTHER, BESIDE = ([DRAW.randrange(3, 500) for _ in range(3 * BLOCK + 7)] for _ in range(3))
STEPS = pytest.mark.parametrize("wait_steps", [0, 3], ids=["while the forward runs", "steps before"])
POLICY = pytest.mark.parametrize("policy", ["recompute", "fail"])


def attentive(**options: Any) -> SmallEngine:
    """vLLM with a connector, its own prefix cache, and a model whose answers depend on all of the prompt."""
    engine = SmallEngine("llama", kv_transfer_config=CONNECTOR, **options)
    with torch.no_grad():
        for layer in engine.runner.get_model().model.layers:
            layer.input_layernorm.weight.fill_(1000)
    return engine


@pytest.fixture(scope="module")
def small() -> SmallEngine:
    """One engine for most tests."""
    return attentive()


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


def flipped(prefix: Any, name: str, data: torch.Tensor) -> torch.Tensor:
    """One bit of the second block, of the first layer, in the exponent of one value."""
    if len(prefix) == 2 * BLOCK and ".0." in name:
        data.view(-1).view(torch.int32)[-3] ^= 1 << 30
    return data


def halved(prefix: Any, name: str, data: torch.Tensor) -> torch.Tensor:
    """Half of each block's V comes, and zeros for the rest."""
    data.view(-1)[-data.numel() // 4 :] = 0
    return data


def anothers(prefix: Any, name: str, data: torch.Tensor) -> torch.Tensor:
    """The first block is that of another prompt."""
    from vllm_on_cpu import host_store

    return host_store.STORE.blocks[tuple(OTHER[:BLOCK])][name] if len(prefix) == BLOCK else data


FAULTS = {"flipped": flipped, "halved": halved, "another's": anothers, "nothing": lambda *_: None}


@pytest.mark.parametrize("fault", FAULTS)
@STEPS
def test_a_wrong_block_is_computed_again_or_its_request_fails(small, store, fault, wait_steps):
    """Whatever is wrong with it, and each time it comes. By default the answer is wrong, and told."""
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
                assert ill != right
                continue
            store.fault = None
            (well,) = serve(small, [BESIDE], "well")
            assert well == beside
            assert found.canary.stats()["gated_blocks"] > 0
            assert found.findings.told("aborted") == []
            if policy == "recompute":
                assert ill == right
                assert [e.fields["request"] for e in found.findings.told("recomputed")] == ["ill-0"]
            else:
                assert small.ends["ill-0"] == "error"
                assert ill == []
