"""What ended requests of a small engine left in the prefix cache: by vLLM's own block pool and tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from canary_vllm.hooks import HOOKS

from canary_adapters import IdleWorkers, ParkedPrefixes, SchedulerRequests
from canary_core import Verification
from vllm_on_cpu.engine import SmallEngine


def requests(small: SmallEngine) -> SchedulerRequests:
    """The scheduler's."""
    return HOOKS._internal[id(small.scheduler)]


def remembered(small: SmallEngine) -> ParkedPrefixes:
    """Of the scheduler."""
    known = requests(small).parked
    assert isinstance(known, ParkedPrefixes)
    return known


def begin(small: SmallEngine) -> None:
    """One turn of a loop that has nothing to do, as of `EngineCoreProc`."""
    (session,) = HOOKS.sessions
    requests(small).idle(IdleWorkers([session.recomputed], lambda pairs: []), lambda: None)


def idle(small: SmallEngine, turns: int = 1) -> None:
    """So many turns of such a loop, and what is begun in these."""
    for _ in range(turns):
        begin(small)
        while small.step():
            pass


def verify(small: SmallEngine, *names: str) -> list[Verification]:
    """Of the prefixes of ended requests, in an engine that is idle."""
    (session,) = HOOKS.sessions
    asked = [session.recomputed.ask(name, parked=True) for name in names]
    idle(small, len(asked) + 1)
    return [answer for one in asked for answer in one.result(0)]


def every(small: SmallEngine) -> dict[str, Verification]:
    """Of all that are remembered."""
    (session,) = HOOKS.sessions
    asked = session.recomputed.ask(None, parked=True)
    idle(small, len(remembered(small).names()) + 2)
    return {answer.request: answer for answer in asked.result(0)}


def serve(small: SmallEngine, name: str, prompt: Sequence[int], new_tokens: int = 8, **more: Any) -> list[int]:
    """One request, from begin to end. Returns the blocks that it had. ``more``: of vLLM's `Request`."""
    small.submit(name, prompt, new_tokens, **more)
    blocks: list[int] = []
    while small.step():
        blocks = small.blocks(name)[0] if small.running(name) else blocks
    return blocks


def queue(small: SmallEngine) -> list[tuple[int, object]]:
    """Free blocks of the prefix cache in the order in which vLLM will evict them, each with its key there."""
    free = small.pool.free_block_queue.get_all_free_blocks()
    return [(block.block_id, block.block_hash) for block in free if block.block_hash is not None]


def scale(small: SmallEngine, layer: int, blocks: Sequence[int], factor: float) -> None:
    """K and V of a layer in these blocks."""
    (tensor,) = [tensor for name, tensor in small.tensors() if f".{layer}." in name]
    with torch.inference_mode():
        tensor[list(blocks)] *= factor
