"""vLLM's own ``kv_load_failure_policy``: a load that a connector rejects is computed again, by the V2 model runner."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import LENGTH
from bugs.museum import Bug, Found
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """Nothing of the engine is replaced: the connector says that it could not load a block, as its interface allows."""
    stage.rejects = True
    yield


def traffic(stage: Any) -> None:
    """Alice is served, and the connector stores her blocks; Bob begins like her, and the connector brings him these
    blocks, or rejects the first one, so that vLLM computes all of them again."""
    from vllm_on_cpu.engine import BLOCK
    from vllm_on_cpu.host_store import STORE

    asked = stage.tokens("alice", 70)
    stage.submit("alice", asked, 4)
    finish(stage)
    if getattr(stage, "rejects", False):
        STORE.failing.add(tuple(asked[:BLOCK]))
        stage.strike()
    stage.submit("bob", [*asked, *stage.tokens("bob", 9)], 6)
    finish(stage)


BUG = Bug(
    title="A rejected load computed again from the wrong position",
    cause="The scheduler takes back what was to be loaded, and the V2 runner goes on counting from behind it.",
    row=LENGTH,
    issues=("vllm#49250",),
    setup="connector_v2",
    broken=broken,
    traffic=traffic,
    default=Found(
        "null_slot",
        2,
        "bob writes position 96 to the null slot 0, where it is lost",
        wrong="no padding leaks, the row's positions run past its blocks; `write_input` follows in the same forward",
    ),
    releases=">=0.32,<0.33",
)
