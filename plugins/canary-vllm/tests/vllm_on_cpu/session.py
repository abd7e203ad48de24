"""`VLLMSession`: a small vLLM for the conformance suite, driven and broken through nothing but vLLM itself."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from canary_core.testing import EngineSession
from vllm_on_cpu.engine import SmallEngine


class VLLMSession(EngineSession):
    """``engine`` with a new KV cache and a new scheduler."""

    def __init__(self, engine: SmallEngine) -> None:
        self.engine = engine
        self._blocks: dict[str, list[int]] = {}
        self._hasher = engine.core.request_block_hasher
        self._identities: list[str] = []
        self._first_weights: list[Tensor] = []
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

    def misfeed(self, request: str) -> None:
        """The bug of a token that is another's, in the buffer of the forward."""

        def wrong(row: int, new: slice) -> None:
            self.engine.runner.input_ids.gpu[new.stop - 1] ^= 1

        self._before_forward(request, wrong)

    def shift_positions(self, request: str) -> None:
        """The bug of positions that count from one."""

        def wrong(row: int, new: slice) -> None:
            self.engine.runner.positions[new] += 1

        self._before_forward(request, wrong)

    def miscount(self, request: str, tokens: int) -> None:
        """The bug of a length that the device has wrong."""

        def wrong(row: int, new: slice) -> None:
            self.engine.runner.seq_lens[row] += tokens

        self._before_forward(request, wrong)

    def misplace_read(self, request: str, position: int, other: str) -> None:
        """The bug of a block table that has another's block."""
        size = self.engine.runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size

        def wrong(row: int, new: slice) -> None:
            table = self.engine.runner.input_batch.block_table[0].block_table.gpu
            table[row, position // size] = self.engine.blocks(other)[0][position // size]

        self._before_forward(request, wrong)

    def submit_as(self, identity: str, request: str, tokens: Sequence[int], new_tokens: int) -> None:
        """Queues a request with a cache salt."""
        self._identities.append(identity)
        self.engine.submit(request, tokens, new_tokens, cache_salt=identity)

    def mix_identities(self) -> None:
        """The bug of a key without the salt: blocks of new requests are keyed as the first one's."""

        def wrong(request: Any) -> Any:
            salt, request.cache_salt = request.cache_salt, self._identities[0]
            try:
                return self._hasher(request)
            finally:
                request.cache_salt = salt

        self.engine.core.request_block_hasher = wrong

    def change_weights(self, kept: bool) -> None:
        """The model's own update, as a trainer calls it; then vLLM's flush of the prefix cache, unless it is
        forgotten."""
        model = self.engine.runner.get_model()
        if not self._first_weights:
            self._first_weights = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.inference_mode():
            model.load_weights((name, p.detach() * 1.01) for name, p in [*model.named_parameters()] if "norm" in name)
        if not kept:
            self.engine.scheduler.reset_prefix_cache()

    def misread(self, request: str) -> None:
        """The bug of a copied block table that is another's at its first block; the runner's own table stays right."""
        runner = self.engine.runner
        builder = runner.attn_groups[0][0].get_metadata_builder()
        right = builder.build

        def wrong(*given: Any, **more: Any) -> Any:
            metadata = right(*given, **more)
            if request in runner.input_batch.req_ids:
                del builder.build
                metadata.block_table = metadata.block_table.clone()
                metadata.block_table[runner.input_batch.req_ids.index(request), 0] ^= 1
            return metadata

        builder.build = wrong

    def spoil_store(self, layer: int, half: str, request: str) -> None:
        """The bug of a stray write: what comes after a layer's attention hits what that layer has just stored."""
        mlp = self.engine.runner.model.model.layers[layer].mlp
        right = mlp.forward

        def wrong(*given: Any, **more: Any) -> Any:
            if request in self.engine.runner.input_batch.req_ids:
                del mlp.forward
                newest = self.engine.scheduler.requests[request].num_computed_tokens - 1
                self.engine.poke(layer, half, request, newest)
            return right(*given, **more)

        mlp.forward = wrong

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
        self.engine.core.request_block_hasher = self._hasher
        with torch.inference_mode():
            for parameter, first in zip(self.engine.runner.get_model().parameters(), self._first_weights, strict=False):
                parameter.data.copy_(first)

    def _before_forward(self, request: str, change: Callable[[int, slice], None]) -> None:
        """``change`` breaks what lies in the runner's buffers for the next forward with the request, given its row and
        where its new tokens are."""
        runner = self.engine.runner
        right = runner._model_forward

        def wrong(*given: Any, **more: Any) -> Any:
            if request in runner.input_batch.req_ids:
                del runner._model_forward
                row = runner.input_batch.req_ids.index(request)
                begin, end = runner.query_start_loc.cpu[row : row + 2].tolist()
                change(row, slice(begin, end))
            return right(*given, **more)

        runner._model_forward = wrong

    def _idle(self) -> "object":
        return next(b for b in self.engine.pool.blocks if b.block_hash is not None and b.ref_cnt == 0)
