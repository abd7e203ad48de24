"""All blocks of a prompt are in the prefix cache once its first chunk is computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import EARLY
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`cache_full_blocks` publishes the blocks that are computed; here all those that the prompt will fill."""
    manager = stage.scheduler.kv_cache_manager

    def allocate(usual: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["num_lookahead_tokens"] = request.num_prompt_tokens
        blocks = usual(request, *args, **kwargs)
        if request.num_computed_tokens + 64 < request.num_prompt_tokens:
            stage.strike()
            manager.cache_blocks(request, request.num_prompt_tokens)
        return blocks

    with patched(manager, "allocate_slots", allocate):
        yield


def traffic(stage: Any) -> None:
    """Alice goes away after the first chunk of a long prompt; Bob asks the same."""
    from vllm.v1.request import RequestStatus

    asked = stage.tokens("alice", 150)
    stage.submit("alice", asked, 4)
    stage.step()
    stage.scheduler.finish_requests(stage.phase + "alice", RequestStatus.FINISHED_ABORTED)
    stage.submit("bob", asked, 4)
    finish(stage)


BUG = Bug(
    title="A prompt is published before its later chunks are computed",
    cause="Blocks get their hashes when they are allocated, so a hit reads what nobody has written.",
    row=EARLY,
    issues=("vllm#37152", "TGI#2489"),
    setup="llama",
    broken=broken,
    traffic=traffic,
    default=Found("unwritten", 4, "bob will read position 64 from slot"),
)
