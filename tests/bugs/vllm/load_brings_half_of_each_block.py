"""A connector brings a part of each block, and says that it is there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import PARTIAL
from bugs.museum import Bug, Found, patched
from bugs.traffic import through_connector


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """A load ends in the middle of a block's bytes."""
    from vllm_on_cpu.host_store import STORE, HostStore

    def load(usual: Any, connector: Any, job: Any) -> None:
        stage.strike()
        for prefix, block in job.blocks:
            for name, data in STORE.blocks[prefix].items():
                there = connector._caches[name][block]
                there[: len(there) // 2] = data[: len(there) // 2]

    with patched(HostStore, "_load", load):
        yield


BUG = Bug(
    title="A load brings half of each block",
    cause="What is brought is cut short, as a read that ends early, and the rest of the block is as it was.",
    row=PARTIAL,
    issues=("LMCache#2206", "LMCache#5151"),
    setup="connector",
    broken=broken,
    traffic=through_connector,
    default=Found(
        "arrival",
        1,
        "not all came: HostStore brought ... for bob without some of its layers, ...: every layer, K",
    ),
)
