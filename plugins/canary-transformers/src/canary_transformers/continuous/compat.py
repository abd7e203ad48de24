"""Places of continuous batching's KV, and hooks on moves of blocks. Differences between versions live here only.

| Transformers | cache                                                                                              |
|--------------|----------------------------------------------------------------------------------------------------|
| 5.17         | groups of equally many layers; per layer of a group one K and one V tensor, common to all groups   |
| 5.18 - 5.24  | one allocator per attention type; the pages of all layers interleave in one flat tensor            |

In both a block belongs to one index space at a time, so index spaces share memory and take turns on it.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from canary_adapters import LayerTensors
from canary_core import AttachError, HookTarget, Patches, tensors_of

FULL, SLIDING = "full_attention", "sliding_attention"

INPUTS = ("prepare_batch_tensors", "reset")
"""Methods of `ContinuousBatchingIOs` with writes to its tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class KVGroup:
    """One index space of a `PagedAttentionCache`: some layers that share block tables.

    index: place of the group in the engine's lists of read and write indices and block tables. block_slots: tokens of
    a block. pool_page: as in `SlotTable`, how the engine numbers slots in its tables. window_tokens: None if all of the
    past is read. null_slots: the slots that no request ever has: padding is read from one and written to another one,
    and in a window one stands for new tokens.
    """

    name: str
    index: int
    layers: tuple[LayerTensors, ...]
    block_slots: int
    null_slots: range
    pool_page: tuple[int, int] | None = None
    window_tokens: int | None = None


Ownership = Literal["alloc", "park", "share", "evict", "free"]
"""Changes of a block's holder: a method of `SlotEvents`."""


class BlockListener(Protocol):
    """Receiver of a cache's actions on blocks outside of forwards. Called in the order of the engine's own actions, on
    the engine's thread; ``group`` is `KVGroup.index`, None for all groups."""

    def moving(self) -> None:
        """Bytes of blocks are about to be copied, on the current stream."""

    def copied(self, group: int | None, source: Sequence[int], destination: Sequence[int]) -> None:
        """Blocks were copied on the device."""

    def arrived(self, group: int | None, blocks: Sequence[int]) -> None:
        """Blocks have content not written by a forward: they were never cleared."""

    def left(self, group: int, blocks: Sequence[int], request: str) -> None:
        """A request's content of blocks was copied to host memory, in the given order."""

    def returned(self, group: int, blocks: Sequence[int], request: str) -> None:
        """Content reported by `left` for a request was copied to the first of ``blocks``; others hold nothing yet."""

    def dropped(self, request: str) -> None:
        """Content reported by `left` for a request will not come back."""

    def changed_hands(self, event: Ownership, group: int, blocks: Sequence[int], request: str | None = None) -> None:
        """Blocks were handed out, shared, parked, evicted or freed; ``request``: the one responsible, if known."""

    def emptied(self) -> None:
        """No block of any group holds anything of value any more."""


def kv_groups(cache: Any) -> tuple[KVGroup, ...]:
    """The index spaces of a `PagedAttentionCache`."""
    if hasattr(cache, "cache_allocators"):
        return tuple(_allocator_group(name, allocator) for name, allocator in cache.cache_allocators.items())
    return _layer_groups_5_17(cache)


def blocks_of(cache: Any, group: KVGroup, requests: Sequence[str]) -> list[Sequence[int] | None]:
    """The cache's blocks of each of ``requests`` in ``group``, by position; None for a forgotten one. Not to be written
    to."""
    table = _block_tables(cache)[group.index]
    return [table.get(request) for request in requests]


def keeps_rings(cache: Any) -> bool:
    """Whether a window's position ``p`` lies where position ``p % window`` does."""
    return hasattr(cache, "cache_allocators")


def cleared(cache: Any) -> bool:
    """Whether a new cache starts as zeros."""
    return hasattr(cache, "cache_allocators")


def pool_tensors(cache: Any) -> dict[str, Tensor]:
    """Every tensor of a `PagedAttentionCache`, by its own names. Whole numbers are indices, not KV."""
    found = tensors_of(cache, lambda name, held: isinstance(held, Tensor) and held.dtype in (torch.int32, torch.int64))
    return {name: found[name] for name in sorted(found, key=lambda name: found[name].nbytes, reverse=True)}


def asynchronous(inputs_and_outputs: Any) -> bool:
    """Whether a batch is prepared on the host while the one before is computed, and copied by a stream of its own."""
    return hasattr(inputs_and_outputs, "io_pairs")


def requests(inputs_and_outputs: Any) -> Sequence[Any]:
    """The `FutureRequestState` objects of the next batch, in batch order."""
    io = inputs_and_outputs
    if asynchronous(io):
        io = io.io_pairs[io.current_pair].host_io
    found: Sequence[Any] = io.requests_in_batch
    return found


def stored_layer(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """The layer whose K and V were stored by `PagedAttentionCache.update` with these arguments; None where the
    attention kernel stores, or the arguments are unknown."""
    given = dict(zip(("key_states", "value_states", "layer_idx", "kwargs"), args, strict=False)) | dict(kwargs)
    layer, more = given.get("layer_idx"), given.get("kwargs")
    if not isinstance(layer, int) or not isinstance(more, dict) or "write_index" not in more:
        return None
    return layer if more.get("block_table") is None else None


def sampled(inputs_and_outputs: Any) -> Tensor | None:
    """Tokens sampled for the batch just run, int32 ``[n]``: in batch order, one for each request with a new token, and
    others behind. Or ``[1 or 2, n]``, with the tokens in the first row. None if kept elsewhere in the installed
    release."""
    tokens = getattr(inputs_and_outputs, "output_ids", None)
    return tokens if isinstance(tokens, Tensor) and tokens.dim() in (1, 2) else None


def require_methods(processor: Any) -> None:
    """Raises `AttachError`, naming each hooked method of a `ContinuousBatchProcessor`'s parts that is missing, or has
    other parameters. To be called before anything is wrapped."""
    cache = processor.cache
    hooked = [
        (processor.model_runner, "compute_batch", ("model", "batch_data")),
        (processor, "prepare_next_batch", ()),
        (processor.offloading_manager, "restore_scheduled_requests", ("requests_in_batch",)),
    ]
    if hasattr(cache, "cache_allocators"):
        copies = ("source_block_ids", "dest_block_ids")
        hooked += [(allocator, "copy_blocks", copies) for allocator in cache.cache_allocators.values()]
        hooked += [(cache.pool, "free_blocks", ("index", "block_ids")), (cache.pool, "reset", ())]
    else:
        hooked += [
            (cache._block_manager, "get_free_blocks", ()),
            (cache, "copy_cache", ("list_source_blocks", "list_forked_blocks")),
        ]
    targets = [(owner, HookTarget(f"{type(owner).__name__}.{name}", names)) for owner, name, names in hooked]
    missing = [problem for owner, target in targets if (problem := target.problem(owner))]
    if missing:
        raise AttachError(
            f"continuous batching of this Transformers can't be followed: {'; '.join(dict.fromkeys(missing))}; install "
            f"a release that canary-transformers was tested with (see canary plugins)"
        )


def watch_blocks(processor: Any, events: BlockListener, patches: Patches) -> None:
    """Makes one `ContinuousBatchProcessor` report its cache's actions to ``events``. Only this object's methods
    change."""
    cache = processor.cache
    _watch_restores(processor.offloading_manager, cache, events, patches)
    if not hasattr(cache, "cache_allocators"):
        _watch_blocks_5_17(cache, events, patches)
        return
    for allocator in cache.cache_allocators.values():
        _watch_copies(allocator, events, patches)
    _watch_ownership(cache, events, patches)


def unable_to_act(processor: Any) -> str | None:
    """The reason why no request of a `ContinuousBatchProcessor` can be taken back; None where one can."""
    if not hasattr(processor.cache, "cache_allocators"):
        return "this Transformers has no pool of blocks to act on; install 5.18 or later"
    if processor.distributed_helper.tp_size > 1:
        return "ranks of tensor parallelism schedule each for itself, and one can't tell the others what it found"
    allocator = next(iter(processor.cache.cache_allocators.values()))
    hooked = [
        (processor, "prepare_next_batch", ()),
        (processor.inputs_and_outputs, "prepare_batch_update", ()),
        (processor.output_router, "fail_and_deliver", ("state", "error")),
        (processor.scheduler, "finish_request", ("request_id",)),
        (processor.scheduler, "add_waiting_request", ("state",)),
        (allocator, "mark_complete_blocks", ("request_id", "token_ids")),
        (allocator.ledger, "evict_cached_blocks", ()),
    ]
    targets = [(owner, HookTarget(f"{type(owner).__name__}.{name}", names)) for owner, name, names in hooked]
    return next((problem for owner, target in targets if (problem := target.problem(owner))), None)


def evict(cache: Any, allocator: Any, blocks: set[int]) -> None:
    """Makes ``blocks``, each with a hash, unknown to prefix sharing. Those without a request go back to the pool, by
    the engine's own eviction; others do when their requests let go."""
    ledger = allocator.ledger
    kept = {block: None for block in ledger.cached_blocks if block not in blocks}
    ledger.cached_blocks = {block: None for block in ledger.cached_blocks if block in blocks}
    try:
        gone = ledger.evict_cached_blocks()
    finally:
        ledger.cached_blocks = kept
    if gone:
        cache.pool.free_blocks(allocator.index, gone)
    for block in blocks.difference(gone):
        hashed = ledger.block_to_hash.pop(block, None)
        if ledger.hash_to_block.get(hashed) == block:
            del ledger.hash_to_block[hashed]


def _allocator_group(name: str, allocator: Any) -> KVGroup:
    stride = allocator.block_physical_stride
    slots = allocator.tokens_per_page
    window = getattr(allocator, "sliding_window", None)
    return KVGroup(
        name,
        allocator.index,
        tuple(
            LayerTensors(layer, {"k": k, "v": v})
            for layer, (k, v) in ((layer, allocator._kv_token_views[layer]) for layer in allocator.layer_indices)
        ),
        block_slots=slots,
        # The first two sectors are trash: one that padding is read from, one that it is written to.
        null_slots=range(2 * allocator.blocks_per_sector * slots),
        pool_page=(stride, slots),
        window_tokens=window,
    )


def _layer_groups_5_17(cache: Any) -> tuple[KVGroup, ...]:
    members: list[list[tuple[int, int]]] = [[] for _ in cache.group_cache_managers]
    for layer, (group, place) in sorted(cache.layer_index_to_group_indices.items()):
        members[group].append((layer, place))
    windows = [getattr(manager, "sliding_window", None) for manager in cache.group_cache_managers]
    types = [FULL if window is None else SLIDING for window in windows]
    return tuple(
        KVGroup(
            types[index] if types.count(types[index]) == 1 else f"{types[index]}.{index}",
            index,
            tuple(LayerTensors(layer, {"k": cache.key_cache[p], "v": cache.value_cache[p]}) for layer, p in layers),
            block_slots=cache.block_size,
            # The last two blocks are trash; the manager of blocks does not know them.
            null_slots=range(cache.read_trash_index, cache.write_trash_index + cache.block_size),
            window_tokens=windows[index],
        )
        for index, layers in enumerate(members)
    )


def tells_inputs(inputs_and_outputs: Any) -> bool:
    """Whether `watch_inputs` can tell."""
    return all(callable(getattr(inputs_and_outputs, name, None)) for name in INPUTS)


def watch_inputs(inputs_and_outputs: Any, tell: Callable[[], None], patches: Patches) -> None:
    """Calls ``tell`` before the engine writes to tensors of the batch before, on the same stream."""

    def wrap(name: str, of_class: bool) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            # What others put in the place of the class's method since is not passed by.
            method = getattr(type(inputs_and_outputs), name).__get__(inputs_and_outputs) if of_class else own
            return method(*args, **kwargs)

        own = getattr(inputs_and_outputs, name)
        patches.wrap(inputs_and_outputs, name, lambda original: _told_before(tell, functools.wraps(original)(call)))

    for name in INPUTS:
        wrap(name, of_class=name not in vars(inputs_and_outputs))


def _told_before(tell: Callable[[], None], original: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, with a call of ``tell`` before each call."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        tell()
        return original(*args, **kwargs)

    return call


def _watch_copies(allocator: Any, events: BlockListener, patches: Patches) -> None:
    def copied(result: None, source_block_ids: list[int], dest_block_ids: list[int], *more: Any, **named: Any) -> None:
        events.copied(allocator.index, source_block_ids, dest_block_ids)

    patches.wrap(allocator, "copy_blocks", partial(_told_before, events.moving))
    patches.follow(allocator, "copy_blocks", copied)


def _watch_ownership(cache: Any, events: BlockListener, patches: Patches) -> None:
    """Blocks come from the pool and go back there. In between each allocator's ledger counts a block's requests, and
    keeps complete blocks without one, for prefix sharing, until it evicts all of them."""
    releasing: list[str] = []
    evicted: dict[int, set[int]] = {}

    def handed_out(blocks: list[int], index: int, num_blocks: int) -> None:
        events.changed_hands("alloc", index, blocks)

    def back_in_pool(result: None, index: int, block_ids: list[int]) -> None:
        gone = evicted.pop(index, set())
        freed = [block for block in block_ids if block not in gone]
        events.changed_hands("evict", index, [block for block in block_ids if block in gone])
        events.changed_hands("free", index, freed, releasing[-1] if releasing else None)

    def follow_ledger(index: int, ledger: Any) -> None:
        def acquired(result: None, block_id: int) -> None:
            events.changed_hands("share", index, [block_id])

        def released(to_pool: bool, block_id: int, *args: Any, **kwargs: Any) -> None:
            if not to_pool and block_id in ledger.cached_blocks:
                events.changed_hands("park", index, [block_id], releasing[-1] if releasing else None)

        def gave_up(blocks: list[int]) -> None:
            evicted.setdefault(index, set()).update(blocks)

        patches.follow(ledger, "acquire", acquired)
        patches.follow(ledger, "release", released)
        patches.follow(ledger, "evict_cached_blocks", gave_up)

    def of_request(original: Any) -> Any:
        def free_blocks(request_id: str, *args: Any, **kwargs: Any) -> Any:
            releasing.append(request_id)
            try:
                return original(request_id, *args, **kwargs)
            finally:
                releasing.pop()

        return free_blocks

    for allocator in cache.cache_allocators.values():
        follow_ledger(allocator.index, allocator.ledger)
        patches.wrap(allocator, "free_blocks", of_request)
    patches.follow(cache.pool, "get_free_blocks", handed_out)
    patches.follow(cache.pool, "free_blocks", back_in_pool)
    patches.follow(cache.pool, "reset", lambda result: events.emptied())


def _watch_restores(manager: Any, cache: Any, events: BlockListener, patches: Patches) -> None:
    tables = list(_block_tables(cache))

    def restoring(original: Any) -> Any:
        @functools.wraps(original)
        def restore_scheduled_requests(requests_in_batch: list[Any], *args: Any, **kwargs: Any) -> None:
            restored = [f.state.request_id for f in requests_in_batch if f.state.is_cpu_offloaded]
            if restored:
                events.moving()
            original(requests_in_batch, *args, **kwargs)
            for request in restored:
                for index, table in enumerate(tables):
                    events.returned(index, table.get(request, ()), request)

        return restore_scheduled_requests

    def offloading(original: Any) -> Any:
        @functools.wraps(original)
        def _offload_to_cpu(victims: list[Any], victim_block_tables: dict[str, dict[str, list[int]]]) -> set[str]:
            offloaded: set[str] = original(victims, victim_block_tables)
            for request in offloaded:
                for name, blocks in victim_block_tables[request].items():
                    events.left(cache.cache_allocators[name].index, blocks, request)
            return offloaded

        return _offload_to_cpu

    patches.wrap(manager, "restore_scheduled_requests", restoring)
    offload = HookTarget(f"{type(manager).__name__}._offload_to_cpu", ("victims", "victim_block_tables"))
    if offload.problem(manager) is None:
        patches.wrap(manager, "_offload_to_cpu", offloading)
        patches.follow(manager, "free_request_cpu_cache", lambda result, state, *more: events.dropped(state.request_id))


def _block_tables(cache: Any) -> Sequence[dict[str, list[int]]]:
    owners = cache.cache_allocators.values() if hasattr(cache, "cache_allocators") else cache.group_cache_managers
    return [owner.block_table for owner in owners]


def _watch_blocks_5_17(cache: Any, events: BlockListener, patches: Patches) -> None:
    # One pool of blocks for all groups. Its memory is not cleared at start, so what a fresh block holds is anything.
    def handed_out(blocks: list[int] | None, *args: Any, **kwargs: Any) -> None:
        events.arrived(None, blocks or ())

    def copied(
        result: None, list_source_blocks: list[int], list_forked_blocks: list[int], *more: Any, **named: Any
    ) -> None:
        events.copied(None, list_source_blocks, list_forked_blocks)

    patches.follow(cache._block_manager, "get_free_blocks", handed_out)
    patches.wrap(cache, "copy_cache", partial(_told_before, events.moving))
    patches.follow(cache, "copy_cache", copied)
