"""Two requests of a decode are given each other's recurrent state."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import STATE
from bugs.museum import Bug, Missed, patched
from bugs.traffic import together


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The map from rows to states is asked in another order than the batch has."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    def get_mamba_indices(usual: Any, pool: Any, rows: Any) -> Any:
        states = usual(pool, rows)
        if len(rows) == 2 and stage.scheduler.cur_batch.forward_mode.is_decode():
            stage.strike()
            return states.flip(0)
        return states

    with patched(HybridReqToTokenPool, "get_mamba_indices", get_mamba_indices):
        yield


BUG = Bug(
    title="Two requests get each other's recurrent state",
    cause="The list of states that the kernel reads is in another order than the requests of the batch.",
    row=STATE,
    issues=("vllm#53505", "vllm#53912"),
    setup="mamba2",
    slow=True,
    broken=broken,
    traffic=together,
    default=Missed(
        "Canary reads SGLang's map from requests to states, not the list that the backend hands to its kernel"
    ),
)
