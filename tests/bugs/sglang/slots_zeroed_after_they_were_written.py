"""New slots are zeroed by another stream, which comes too late."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import ZEROING
from bugs.museum import Bug, Found, patched
from bugs.traffic import together


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """What `alloc` has handed out is zeroed when the forward that fills it has run."""
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    late: list[Any] = []

    def alloc(usual: Any, allocator: Any, need_size: int) -> Any:
        slots = usual(allocator, need_size)
        late.append(slots.clone())
        return slots

    def run_batch(usual: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        result = usual(scheduler, *args, **kwargs)
        while late:
            stage.strike()
            stage.pool.k_buffer[1][late.pop()] = 0
        return result

    with (
        patched(TokenToKVPoolAllocator, "alloc", alloc),
        patched(type(stage.scheduler), "run_batch", run_batch),
    ):
        yield


BUG = Bug(
    title="New slots are zeroed after they were written",
    cause="The zeroing of new pages runs beside the forward that fills them, and ends after it.",
    row=ZEROING,
    issues=("vllm#48085", "llama.cpp#12253"),
    setup="mha",
    broken=broken,
    traffic=together,
    default=Found("bytes", 8, "the bytes of slot ... of k.1 changed since alice wrote them ...: a stray write"),
)
