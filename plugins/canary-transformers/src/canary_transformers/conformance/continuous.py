"""`ContinuousSession`: continuous batching for the conformance suite, from outside of Canary and of the adapters."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig

from canary_core.testing import EngineSession, one_thread
from canary_transformers.tiny_models import Sizes, spare_the_collector, tiny_model

LAYERS, HALVES = 3, ("k", "v")
VOCABULARY = 128
LONGEST_PROMPT = 40
POSITIONS = 256
PAGE_TOKENS = 8
POOL_TOKENS = 256
"""Few enough that requests wait for each other and cached blocks are evicted."""
BATCH_TOKENS = 20
"""Fewer than the longest prompt, so that it is read in parts."""
WINDOW_TOKENS = 36
Q_PADDING, KV_PADDING = 8, 64
"""To multiples of how many tokens the engine pads."""

ModelName = Literal["llama", "gemma3"]


class ContinuousSession(EngineSession):
    """One manager of continuous batching, without its thread: `step` runs one turn of its loop.

    Only the engine's own functions act here, and only its own tables are read. Batches are padded as for CUDA graphs
    and torch.compile, done by the engine itself on a GPU only. ``asynchronous``: a batch is prepared while the one
    before runs.
    """

    def __init__(self, model: ModelName = "llama", asynchronous: bool = False) -> None:
        # It tells about missing extras and, where a fault makes NaNs, about those.
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
        self._model = tiny_model(model, 0, Sizes(VOCABULARY, POSITIONS, WINDOW_TOKENS, LAYERS))
        spare_the_collector()
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        self._manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(**options),  # type: ignore[no-untyped-call]  # Transformers has no types
            continuous_batching_config=ContinuousBatchingConfig(
                **self._engine_options(model),
                max_batch_tokens=BATCH_TOKENS,
                # While a long prompt is read in parts all others wait, with content that a forward does not read.
                scheduler_type="prefill_first",
                use_async_batching=asynchronous,
                q_padding_interval_size=Q_PADDING,
                kv_padding_interval_size=KV_PADDING,
            ),
        )
        self._processor = self._manager._create_batch_processor()
        self._manager.batch_processor = self._processor
        self._processor.model_runner.pad_inputs = True
        self._cache = self._processor.cache
        self._behind = asynchronous
        """Whether the first batch is still to come, updated only after the second one."""
        self._prompts: dict[str, Sequence[int]] = {}
        self._answers: dict[str, Sequence[int]] = {}
        self._errors: dict[str, str | None] = {}
        self._first_weights: list[Tensor] = []

    def _engine_options(self, model: ModelName) -> dict[str, Any]:
        return {"page_size": PAGE_TOKENS, "num_blocks": POOL_TOKENS // PAGE_TOKENS, "auto_switch_to_flash": False}

    def pool_tensors(self) -> Mapping[str, Tensor]:
        """One flat tensor, common to all layers."""
        return {"cache_tensor": self._cache.cache_tensor}

    def submit(self, request: str, tokens: Sequence[int], new_tokens: int) -> None:
        """Queues a request. Its answer is streamed, and so known token by token."""
        self._prompts[request], self._answers[request] = tuple(tokens), ()
        self._manager.add_request(list(tokens), request_id=request, max_new_tokens=new_tokens, streaming=True)

    def step(self) -> bool:
        """One round of the engine's loop; False if there was nothing to run."""
        with one_thread():
            if not self._processor.prepare_next_batch():
                return False
            self._manager._generation_step()
            if not self._behind:
                self._processor.update_batch()
            self._behind = False
        while (output := self._manager.get_result(timeout=0)) is not None:
            self._answers[output.request_id] = tuple(output.generated_tokens)
            self._errors[output.request_id] = output.error
        return True

    def answer(self, request: str) -> Sequence[int]:
        """The answer streamed so far."""
        return self._answers[request]

    def error(self, request: str) -> str | None:
        """The error that ended the request, if one did."""
        return self._errors.get(request)

    def poke(self, layer: int, half: str, request: str, position: int) -> None:
        """Flips a bit, found through the request's block table. A block has a page for each layer of its attention
        type, a page all K and then all V; a window is a ring of the last tokens."""
        allocator = self._cache.layer_to_allocator[layer]
        place = position % getattr(allocator, "sliding_window", POSITIONS)
        block = allocator.block_table[request][place // PAGE_TOKENS]
        self._part(layer, half)[block, place % PAGE_TOKENS, 2] ^= 16

    def _part(self, layer: int, half: str) -> Tensor:
        """K or V of one layer, in bytes: [blocks, tokens of a page, bytes of a token]."""
        allocator = self._cache.layer_to_allocator[layer]
        shape = (
            -1,
            len(allocator.layer_indices),
            len(HALVES),
            PAGE_TOKENS,
            allocator.bytes_per_page // 2 // PAGE_TOKENS,
        )
        views: Tensor = self._cache.cache_tensor.view(shape)
        return views[:, allocator.layer_indices.index(layer), HALVES.index(half)]

    def close(self) -> None:
        """Restores the model for the next session."""
        self._manager.batch_processor = None
        self._model.set_attn_implementation("sdpa")
        with torch.no_grad():
            for parameter, first in zip(self._model.parameters(), self._first_weights, strict=False):
                parameter.copy_(first)

    def evict(self) -> None:
        """The engine's own action when memory is short, before it takes a request's blocks."""
        self._cache.evict_cached_blocks()

    def preempt(self, request: str) -> None:
        """The engine's own preemption, as if ``request`` needed more than there is."""
        scheduler = self._processor.scheduler
        scheduler.starved_requests = [(scheduler.active_requests[request], 100 * POOL_TOKENS)]
        self._processor.offloading_manager.offload_requests()

    def fork(self, request: str, child: str) -> None:
        """The engine's own action for ``num_return_sequences``: full blocks are shared, the last one is copied."""
        state = self._processor.scheduler.active_requests[request]
        self._fork_blocks(state, child)
        self._processor.scheduler.active_requests[child] = state.fork(child)
        self._prompts[child], self._answers[child] = self._prompts[request], self._answers[request]

    def _fork_blocks(self, state: Any, child: str) -> None:
        copies: dict[str, tuple[list[int], list[int]]] = {name: ([], []) for name in self._cache.cache_allocators}
        if self._cache.prepare_fork_request(state, [child], copies) != [child]:
            raise RuntimeError(f"no room to fork {state.request_id}")
        self._cache.perform_cache_copy(copies)

    def misplace_write(self, request: str) -> None:
        """The bug of a wrong write index: the last new token goes to the slot of the request's first one."""
        outputs, prepare = self._processor.inputs_and_outputs, self._processor.inputs_and_outputs.prepare_batch_tensors

        def wrong(*args: Any, **kwargs: Any) -> None:
            del outputs.prepare_batch_tensors
            prepare(*args, **kwargs)
            names = [scheduled.state.request_id for scheduled in outputs.requests_in_batch]
            end = outputs.cumulative_seqlens_q[names.index(request) + 1]
            for group, first in enumerate(self._first_slots(request)):
                outputs.write_index_storage[group, end - 1] = first

        outputs.prepare_batch_tensors = wrong

    def misfeed(self, request: str) -> None:
        """The bug of a token that is another's, in the buffer of the forward."""

        def wrong(outputs: Any, row: int, new: slice) -> None:
            outputs.input_ids[new.stop - 1] ^= 1

        self._once_prepared(request, wrong)

    def keep_stale(self, request: str) -> None:
        """The bug of a buffer that was not filled: what the batch before had there stays, or another token."""
        stale = self._processor.inputs_and_outputs.input_ids.clone()

        def wrong(outputs: Any, row: int, new: slice) -> None:
            last = new.stop - 1
            right = outputs.input_ids[last].clone()
            outputs.input_ids[last] = stale[last] if stale[last] != right else right ^ 1

        self._once_prepared(request, wrong)

    def shift_positions(self, request: str) -> None:
        """The bug of positions that count from one."""

        def wrong(outputs: Any, row: int, new: slice) -> None:
            outputs.position_ids[new] += 1

        self._once_prepared(request, wrong)

    def miscount(self, request: str, tokens: int) -> None:
        """The bug of cumulative lengths that count another number of tokens for one request."""

        def wrong(outputs: Any, row: int, new: slice) -> None:
            for lengths in outputs.cumulative_seqlens_k.values():
                lengths[row + 1 :] += tokens

        self._once_prepared(request, wrong)

    def misplace_read(self, request: str, position: int, other: str) -> None:
        """The bug of a read index that has another's slot."""

        def wrong(outputs: Any, row: int, new: slice) -> None:
            for name, group in self._cache.cache_allocators.items():
                outputs.read_index_storage[group.index, self._place(outputs, name, row, position)] = self._slot(
                    group, other, position
                )

        self._once_prepared(request, wrong)

    def misread(self, request: str) -> None:
        """The bug of a list for attention, of the slots to read or else of those to write, with another slot in it; the
        block tables stay right."""

        def wrong(outputs: Any, row: int, new: slice) -> None:
            for name, group in self._cache.cache_allocators.items():
                if outputs.true_read_sizes[group.index]:
                    outputs.read_index_storage[group.index, self._place(outputs, name, row, 0)] ^= 1
                else:
                    outputs.write_index_storage[group.index, new.start] ^= 1

        self._once_prepared(request, wrong)

    def miscopy(self, layer: int, half: str) -> None:
        """The bug of a copy that forgets one part."""
        allocator, part = self._cache.layer_to_allocator[layer], self._part(layer, half)
        allocator._copy_view = _Forgetful(allocator, part)

    def spoil_store(self, layer: int, half: str, request: str) -> None:
        """The bug of a stray write: it hits what a layer has just stored."""
        cache, right = self._cache, self._cache.update

        def wrong(*args: Any, **kwargs: Any) -> Any:
            done = right(*args, **kwargs)
            if layer in (kwargs.get("layer_idx"), *args[2:3]):
                cache.update = right
                state = self._processor.scheduler.active_requests[request]
                self.poke(layer, half, request, state.position_offset - 1)
            return done

        cache.update = wrong

    def change_weights(self, kept: bool) -> None:
        """Weights change in place, as a trainer does it; then the cache gives up what nobody holds, unless that is
        forgotten."""
        if not self._first_weights:
            self._first_weights = [parameter.detach().clone() for parameter in self._model.parameters()]
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.mul_(1.01)
        if not kept:
            self.evict()

    def _once_prepared(self, request: str, change: Callable[[Any, int, slice], None]) -> None:
        """``change`` breaks what lies in the buffers for the next forward with the request, given them, its row and
        where its new tokens are."""
        outputs = self._processor.inputs_and_outputs
        prepare = outputs.prepare_batch_tensors

        def wrong(*args: Any, **kwargs: Any) -> None:
            prepare(*args, **kwargs)
            names = [scheduled.state.request_id for scheduled in outputs.requests_in_batch]
            if request in names:
                outputs.prepare_batch_tensors = prepare
                row = names.index(request)
                change(outputs, row, slice(*outputs.cumulative_seqlens_q[row : row + 2].tolist()))

        outputs.prepare_batch_tensors = wrong

    def _place(self, outputs: Any, group: str, row: int, position: int) -> int:
        """Where the read index has ``position`` of a row; of a window it has the last tokens."""
        state = outputs.requests_in_batch[row].state
        return int(outputs.cumulative_seqlens_k[group][row + 1] - (state.position_offset - position))

    def _slot(self, group: Any, request: str, position: int) -> int:
        place = position % getattr(group, "sliding_window", POSITIONS)
        return int(group.block_table[request][place // PAGE_TOKENS] * group.block_physical_stride + place % PAGE_TOKENS)

    def _first_slots(self, request: str) -> list[int]:
        """First slot for each attention type, numbered as in the engine's lists."""
        allocators = self._cache.cache_allocators.values()
        return [a.block_table[request][0] * a.block_physical_stride for a in allocators]

    def release_running(self, request: str) -> None:
        """The bug of a free too many: the last block of a running request goes back to the pool."""
        for allocator in self._cache.cache_allocators.values():
            self._cache.pool.free_blocks(allocator.index, allocator.block_table[request][-1:])

    def release_again(self, request: str) -> None:
        """The bug of a double release: blocks kept only by the ledger are released once more."""
        for allocator, blocks in self._cached(request):
            for block in blocks:
                allocator.ledger.release(block)

    def hand_out_cached(self) -> None:
        """The bug of a lost eviction: a block kept by the ledger is among the free ones, and so is handed out."""
        request = next(name for name in self._prompts if any(blocks for _, blocks in self._cached(name)))
        for allocator, (block, *_) in self._cached(request):
            free = self._cache.pool._free_blocks[allocator.index]
            others = free.pop_leaves(len(free))
            free.add_leaves([block])
            self._cache.pool.get_free_blocks(allocator.index, 1)
            free.add_leaves(others)

    def _cached(self, request: str) -> list[tuple[Any, list[int]]]:
        """By allocator, the blocks of a finished request kept by the ledger."""
        tokens = [*self._prompts[request], *self._answers[request]]
        return [(a, a.match_prefix_blocks(tokens)) for a in self._cache.cache_allocators.values()]


class _Forgetful:
    """In the place of what an allocator copies blocks in: at the next copy ``part`` keeps what it had."""

    def __init__(self, allocator: Any, part: Tensor) -> None:
        self._allocator, self._part = allocator, part
        self._blocks: Tensor = allocator._copy_view
        self.device = self._blocks.device

    def index_select(self, dimension: int, blocks: Tensor) -> Tensor:
        """The blocks as they are."""
        return self._blocks.index_select(dimension, blocks)

    def index_copy_(self, dimension: int, blocks: Tensor, content: Tensor) -> None:
        """All of ``content`` but the part."""
        self._allocator._copy_view = self._blocks
        before = self._part[blocks].clone()
        self._blocks.index_copy_(dimension, blocks, content)
        self._part[blocks] = before
