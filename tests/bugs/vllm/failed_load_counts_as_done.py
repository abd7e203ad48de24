"""A connector's load fails, and counts as done."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import TIER
from bugs.museum import Bug, Found, patched
from bugs.traffic import through_connector


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """A load that fails is reported; here it is not, and the blocks stay as they are."""
    from vllm_on_cpu.host_store import HostStore

    def load(usual: Any, connector: Any, job: Any) -> None:
        stage.strike()

    with patched(HostStore, "_load", load):
        yield


BUG = Bug(
    title="A failed load counts as done",
    cause="The connector says that blocks have come, and they are as they were.",
    row=TIER,
    issues=("dynamo#15079",),
    setup="connector",
    broken=broken,
    traffic=through_connector,
    default=Found(
        "arrival",
        1,
        "nothing came: HostStore is said to have brought ... for bob, and what lies there is what lay there before",
    ),
)
