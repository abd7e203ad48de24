"""A connector brings one layer, and says that all have come."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import PARTIAL
from bugs.museum import Bug, Found, patched
from bugs.traffic import through_connector


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """A load ends with the first layer."""
    from vllm_on_cpu.host_store import STORE, HostStore

    def load(usual: Any, connector: Any, job: Any) -> Any:
        stage.strike()
        first = min(connector._caches)
        STORE.fault = lambda prefix, name, data: data if name == first else None
        try:
            return usual(connector, job)
        finally:
            STORE.fault = None

    with patched(HostStore, "_load", load):
        yield


BUG = Bug(
    title="A load brings the first layer only",
    cause="The connector counts a load as done when its first layer is there.",
    row=PARTIAL,
    issues=("sglang#38031", "sglang#31427"),
    setup="connector",
    broken=broken,
    traffic=through_connector,
    default=Found(
        "arrival", 1, "not all came: HostStore brought ... for bob without some of its layers, ...: layer 1 K and V"
    ),
)
