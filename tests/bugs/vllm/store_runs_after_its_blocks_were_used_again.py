"""A connector stores blocks when somebody else has them already."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import HOST
from bugs.museum import Bug, Found, patched
from bugs.traffic import through_connector


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """What a step completes is stored at its end; here when twelve more steps are done."""
    from vllm_on_cpu.host_store import HostStore

    late: list[Any] = []

    def wait_for_save(usual: Any, connector: Any) -> Any:
        metadata = connector._get_connector_metadata()
        late.append(metadata.stores)
        metadata.stores = []
        if len(late) > 12:
            metadata.stores = late.pop(0)
            stage.strike()
        return usual(connector)

    with patched(HostStore, "wait_for_save", wait_for_save):
        yield


BUG = Bug(
    title="A store runs after its blocks were used again",
    cause="Blocks are given to the next request before the connector has read them.",
    row=HOST,
    issues=("vllm#51637", "vllm#46951"),
    setup="connector",
    broken=broken,
    traffic=through_connector,
    default=Found(
        "arrival",
        60,
        "KV of another sequence came: HostStore brought ... for bob ...; these are positions 0 to 31 of other",
    ),
)
