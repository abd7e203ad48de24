"""The suite on a right plugin, again and again: it passes whatever memory held before, and whatever page comes next.

PYTHONPATH=src:tests:examples/canary-toy/src python -m conformance.many_runs 100

A second number is the first run's, 0 by default: each run has other pages and other noise.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from canary_toy.session import ToyConformance
from canary_toy.toy_engine import BlockAllocator, Engine, KVPool
from torch import Tensor

from canary_core.testing import run_suite


@dataclass(frozen=True)
class Memory:
    """How engines get memory. ``order``: the page that is handed out next, the one freed last or first, or any.
    ``before``: content of a new pool: zeros, noise, or all that the engine before has left."""

    order: Literal["last", "first", "any"] = "last"
    before: Literal["zeros", "noise", "left"] = "left"
    seed: int = 0

    @classmethod
    def of(cls, run: int) -> "Memory":
        """Every combination in nine runs, with other pages and other noise in each."""
        return cls(("last", "first", "any")[run % 3], ("left", "noise", "zeros")[run // 3 % 3], run)


def in_used_memory(patch: pytest.MonkeyPatch, memory: Memory, pages: int | None = None) -> None:
    """From now on each toy engine gets its memory so. ``pages``: of each pool."""
    left: list[Tensor] = []
    draw, noise = random.Random(memory.seed), torch.Generator().manual_seed(memory.seed)
    pool, allocator, allocate = KVPool.__init__, BlockAllocator.__init__, BlockAllocator.allocate

    def uncleared(own: KVPool, count: int, device: torch.device) -> None:
        pool(own, count, device)
        for layer, kv in enumerate(own.layers):
            if memory.before == "left" and left:
                kv.copy_(left[layer])
            elif memory.before != "zeros":
                kv.copy_(torch.randn(kv.shape, generator=noise))
        left[:] = own.layers

    def turned(own: BlockAllocator, count: int) -> None:
        allocator(own, count)
        own.free_pages.reverse()

    def first_in_first_out(own: BlockAllocator, given: Sequence[int]) -> None:
        own.free_pages[:0] = given

    def shuffled(own: BlockAllocator, count: int) -> list[int]:
        draw.shuffle(own.free_pages)
        return allocate(own, count)

    patch.setattr(KVPool, "__init__", uncleared)
    if memory.order == "first":
        patch.setattr(BlockAllocator, "__init__", turned)
        patch.setattr(BlockAllocator, "free", first_in_first_out)
    elif memory.order == "any":
        patch.setattr(BlockAllocator, "allocate", shuffled)
    if pages is not None:
        patch.setattr(Engine.__init__, "__defaults__", (pages, *(Engine.__init__.__defaults__ or ())[1:]))


def failures(run: int, patch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Test and message of what does not pass."""
    in_used_memory(patch, Memory.of(run))
    return [(o.test, o.message) for o in run_suite(ToyConformance) if o.result not in ("passed", "undeclared")]


def main() -> None:
    """Runs, and what failed in them."""
    runs, first, passed = int(sys.argv[1]), int((*sys.argv, "0")[2]), 0
    for run in range(first, first + runs):
        with pytest.MonkeyPatch.context() as patch:
            failed = failures(run, patch)
        passed += not failed
        sys.stdout.write(f"run {run} ({Memory.of(run)}): {failed or 'passed'}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{passed} of {runs} runs passed\n")


if __name__ == "__main__":
    main()
