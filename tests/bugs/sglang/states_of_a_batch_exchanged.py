"""Two requests of a decode are given each other's recurrent state."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import STATE
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


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


def traffic(stage: Any) -> None:
    """Alice and Bob decode side by side for a while: tables are compared now and then."""
    stage.submit("alice", stage.tokens("alice", 24), 36)
    stage.submit("bob", stage.tokens("bob", 31), 36)
    finish(stage)


SENTENCE = (
    "mamba_cache_indices of Mamba2AttnBackend names slot ... for which the engine keeps slot ... Attention was given"
)

BUG = Bug(
    title="Two requests get each other's recurrent state",
    cause="The list of states that the kernel reads is in another order than the requests of the batch.",
    row=STATE,
    issues=("vllm#53505", "vllm#53912"),
    setup="mamba2",
    slow=True,
    broken=broken,
    traffic=traffic,
    default=Found("read_table", 32, SENTENCE),
    thorough=Found("read_table", 1, SENTENCE),
)
