"""A connector fills the blocks of a request in another order."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import TIER
from bugs.museum import Bug, Found, patched
from bugs.traffic import through_connector


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """A load fills each block with its own prefix's KV; here with that of the next one."""
    from vllm_on_cpu.host_store import HostStore

    def load(usual: Any, connector: Any, job: Any) -> Any:
        stage.strike()
        prefixes = [prefix for prefix, _ in job.blocks]
        job.blocks = [
            (prefix, block) for prefix, (_, block) in zip(prefixes[1:] + prefixes[:1], job.blocks, strict=True)
        ]
        return usual(connector, job)

    with patched(HostStore, "_load", load):
        yield


BUG = Bug(
    title="A connector fills the wrong blocks",
    cause="What was stored for one block is brought to another one of the request.",
    row=TIER,
    issues=("dynamo#8419",),
    setup="connector",
    broken=broken,
    traffic=through_connector,
    default=Found(
        "arrival",
        1,
        "KV of another sequence came: HostStore brought ... for bob ...; these are positions 32 to 63 of alice",
    ),
)
