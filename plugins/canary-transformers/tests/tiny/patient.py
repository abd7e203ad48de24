"""`ContinuousPatient`: continuous batching that is injured from outside; see `support.injuries`."""

from collections.abc import Sequence
from typing import Any

import canary_transformers
import torch
from canary_transformers.conformance.continuous import HALVES, LAYERS, PAGE_TOKENS, ContinuousSession
from support.injuries import ALICE, BOB, INJURIES, PROMPT, SEEDS, Patient, hurt, summed_up
from torch import Tensor

from canary_core import Canary
from canary_core.testing import FaultInjector, Findings


class ContinuousPatient(Patient):
    """Two requests of a tiny LLaMA; findings are told at once. ``settings``: of the guard."""

    layers, halves, page = LAYERS, HALVES, PAGE_TOKENS

    def __init__(self, **settings: Any) -> None:
        self.session = ContinuousSession()
        self.guard = canary_transformers.guard(
            self.session._model, **{"read_check": -1, "scrub_budget": "64KiB", "log_level": "error", **settings}
        )
        self.findings = Findings()
        self.guard.register(self.findings)
        # What bytes a slot had before its first write is not known, so each is written once.
        for number in range(9):
            self._finish(f"before-{number}", [(3 * i + 7 * number) % 120 + 4 for i in range(30)])
        for number, request in enumerate((ALICE, BOB)):
            tokens = [(11 * i + 5 * number + 3) % 120 + 3 for i in range(PROMPT + number)]
            self.session.submit(request, tokens, 40)
        while min(len(self.session.answer(r)) for r in (ALICE, BOB)) < 4:
            self.step()

    @property
    def canary(self) -> Canary:
        (session,) = self.guard._sessions
        return session.canary

    @property
    def _allocator(self) -> Any:
        return self.session._cache.layer_to_allocator[0]

    @property
    def _blocks(self) -> Any:
        return self._allocator.block_table

    def cell(self, layer: int, half: str, request: str, position: int) -> Tensor:
        index = self._allocator.layer_indices.index(layer)
        block = self._blocks[request][position // PAGE_TOKENS]
        return self._pages[block, index, HALVES.index(half), position % PAGE_TOKENS]

    def cached(self, request: str) -> int:
        return PROMPT + (ALICE, BOB).index(request) + len(self.session.answer(request)) - 1

    def step(self) -> None:
        self.session.step()

    def exchange_entries(self, one: tuple[str, int], other: tuple[str, int], both: bool) -> None:
        (a, i), (b, j) = one, other
        kept, self._blocks[a][i] = self._blocks[a][i], self._blocks[b][j]
        if both:
            self._blocks[b][j] = kept

    def lose_writes(self, layers: Sequence[int]) -> None:
        runner = self.session._processor.model_runner

        def compute(*args: Any, **kwargs: Any) -> None:
            del runner._forward_process_and_sample
            before = self._pages.clone()
            runner._forward_process_and_sample(*args, **kwargs)
            for layer in layers:
                index = self._allocator.layer_indices.index(layer)
                self._pages[:, index] = before[:, index]

        runner._forward_process_and_sample = compute

    @property
    def _pages(self) -> Tensor:
        """The whole cache: uint8 ``[blocks, layers, halves, page, bytes]``."""
        allocator = self._allocator
        shape = (-1, len(allocator.layer_indices), 2, PAGE_TOKENS, allocator.bytes_per_page // 2 // PAGE_TOKENS)
        return self.session._cache.cache_tensor.view(torch.uint8).view(shape)

    def do(self, what: str) -> None:
        getattr(self, f"_{what}")()

    def _release_running(self) -> None:
        self.session.release_running(ALICE)

    def _misplace_write(self) -> None:
        self.session.misplace_write(ALICE)

    def _finish(self, request: str, tokens: list[int]) -> None:
        self.session.submit(request, tokens, 2)
        while len(self.session.answer(request)) < 2:
            self.step()
        self.step()

    def _exchange_inputs(self) -> None:
        """By the core's own fault."""
        self.guard.register(FaultInjector.parse(f"next_token_swap:warmup={self.canary.forwards}", seed=1))

    def _release_again(self) -> None:
        self._finish("c", [(7 * i) % 100 + 9 for i in range(30)])
        self.canary.drain()
        self.session.release_again("c")

    def _hand_out_held(self) -> None:
        self._finish("c", [(7 * i) % 100 + 9 for i in range(30)])
        self.session._prompts = {"c": self.session._prompts["c"]}
        self.session.hand_out_cached()

    def _evict_in_use(self) -> None:
        allocator = self._allocator
        hashed = [b for b in self._blocks[ALICE] if b in allocator.ledger.block_to_hash]
        allocator.ledger.cached_blocks[hashed[0]] = None
        self.session._cache.evict_cached_blocks()

    def _foreign_prefix(self) -> None:
        """Two prompts of one length; a hash that leads to the other one's block, as a collision would."""
        one, two = ([(n * i) % 100 + 9 for i in range(30)] for n in (7, 13))
        self._finish("c", one)
        self._finish("d", two)
        ledger = self._allocator.ledger
        first, second = (self._allocator.match_prefix_blocks(tokens)[0] for tokens in (one, two))
        ledger.hash_to_block[ledger.block_to_hash[first]] = second
        self.session.submit("e", one, 4)

    def close(self) -> None:
        """Ends engine and guard."""
        self.session.close()
        self.guard.close()


CANNOT = {
    "two tokens in one slot": "its write list is one tensor for all layers, made anew in each forward",
    "a prefix published too early": "its small pool has no free block that was never written",
    "padding in a live row": "its table has no null entry for full attention",
}
"""Injuries that this engine's tables or lists have no place for."""


def main() -> None:
    """Does every injury with several seeds; prints what was told, a JSON line each."""
    import json
    import sys
    from importlib.metadata import version

    for name in (name for name in INJURIES if name not in CANNOT):
        for seed in SEEDS:
            patient = ContinuousPatient()
            told = hurt(patient, name, seed)
            patient.close()
            sys.stdout.write(
                json.dumps({"engine": f"Transformers {version('transformers')}", **summed_up(told)}) + "\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
