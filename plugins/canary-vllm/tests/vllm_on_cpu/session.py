"""`VLLMSession`: a small vLLM for the conformance suite, driven and broken through nothing but vLLM itself."""

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from canary_core.testing import EngineSession
from vllm_on_cpu.engine import SmallEngine


class VLLMSession(EngineSession):
    """``engine`` with a new KV cache and a new scheduler."""

    def __init__(self, engine: SmallEngine) -> None:
        self.engine = engine
        self._blocks: dict[str, list[int]] = {}
        engine.renew()

    def pool_tensors(self) -> Mapping[str, Tensor]:
        """What vLLM has bound to its layers."""
        return dict(self.engine.tensors())

    def submit(self, request: str, tokens: Sequence[int], new_tokens: int) -> None:
        """Queues a request."""
        self.engine.submit(request, tokens, new_tokens)

    def step(self) -> bool:
        """A step of the engine core that runs a forward."""
        with torch.inference_mode():
            return self.engine.step()

    def answer(self, request: str) -> Sequence[int]:
        """What was generated so far."""
        return self.engine.answers[request]

    def poke(self, layer: int, half: str, request: str, position: int) -> None:
        """Flips a bit where vLLM's block tables say that this KV is."""
        self.engine.poke(layer, half, request, position)

    def misplace_write(self, request: str) -> None:
        """The bug of a wrong slot mapping: the request's next token goes to the last block of the pool."""
        runner = self.engine.runner
        tables = runner.input_batch.block_table
        right = tables.compute_slot_mapping

        def wrong(rows: int, starts: Tensor, *args: object) -> None:
            right(rows, starts, *args)
            if request in runner.input_batch.req_ids:
                del tables.compute_slot_mapping
                row = runner.input_batch.req_ids.index(request)
                tables[0].slot_mapping.gpu[int(starts[row + 1]) - 1] = len(self.engine.pool.blocks) * 32 - 1

        tables.compute_slot_mapping = wrong

    def release_running(self, request: str) -> None:
        """The bug of a free too many: the last block of a running request goes back to the pool."""
        self.engine.pool.free_blocks([self.engine.pool.blocks[self.engine.blocks(request)[0][-1]]])

    def release_again(self, request: str) -> None:
        """The bug of a double release: a cached block that nobody has is freed once more."""
        self.engine.pool.free_blocks([self._idle()])

    def hand_out_cached(self) -> None:
        """The bug of a lost eviction: the pool forgets that a block is cached, not the cache, and hands it out."""
        pool, block = self.engine.pool, self._idle()
        block.reset_hash()
        pool.free_block_queue.remove(block)
        pool.free_block_queue.prepend_n([block])
        pool.get_new_blocks(1)

    def evict(self) -> None:
        """The prefix cache drops what nobody has."""
        self.engine.pool.evict_blocks({b.block_id for b in self.engine.pool.blocks if b.block_hash and not b.ref_cnt})

    def preempt(self, request: str) -> None:
        """Takes a running request's blocks, as the scheduler does when the pool is full."""
        scheduler = self.engine.scheduler
        running = scheduler.requests[request]
        scheduler.running.remove(running)
        scheduler._preempt_request(running, time.monotonic())

    def close(self) -> None:
        """The next session begins with `SmallEngine.renew`."""

    def _idle(self) -> "object":
        return next(b for b in self.engine.pool.blocks if b.block_hash is not None and b.ref_cnt == 0)
