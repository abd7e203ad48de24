"""A new request begins with the recurrent state that its slot's last owner left."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import STATE
from bugs.museum import Bug, Missed, patched
from bugs.traffic import together


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`MambaPool.clear_slots` does nothing."""
    from sglang.srt.mem_cache.memory_pool import MambaPool

    def clear_slots(usual: Any, pool: Any, indices: Any) -> None:
        stage.strike()

    with patched(MambaPool, "clear_slots", clear_slots):
        yield


BUG = Bug(
    title="A new request begins with an old recurrent state",
    cause="The state's slot is not cleared when it is handed out, and the first prefill continues what lay there.",
    row=STATE,
    issues=("vllm#53505",),
    setup="mamba2",
    slow=True,
    broken=broken,
    traffic=together,
    default=Missed(
        "a state that a request begins with counts as empty, whatever bytes are there; here that does no harm: "
        "SGLang's kernels don't read the state of a request that has nothing before, and answers are the same"
    ),
)
