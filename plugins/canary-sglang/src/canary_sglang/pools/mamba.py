"""Recurrent states of hybrid models (Mamba, linear attention, short convolutions): the region ``mamba``, one slot a
request, which every forward rewrites.

SGLang keeps them in a `MambaPool` beside the KV pool. A request's slot stands in ``req_index_to_mamba_index_mapping``;
the prefix cache holds slots of its own. States move between slots in two ways, and records go with them: ``copy_from``,
when an unfinished request's state is cached, and a copy that is noted in the `ForwardBatch` and done in the forward,
when a cached state is reused. With ``extra_buffer`` forwards themselves put states aside, see `checkpoints`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from canary_adapters import Part, ragged_table, ring_table, row_source, slot_table
from canary_core import (
    AttachError,
    BatchView,
    Canary,
    KVSource,
    PoolAdapter,
    Region,
    RegionKind,
    SlotTable,
    StepListener,
    Uncovered,
)
from canary_sglang.compat import batches
from canary_sglang.compat.state_checkpoints import Checkpoints, tracked_slots

REGION = "mamba"

KV = "full"
"""The region with the KV of the same tokens."""

NULL_STATE = 0
"""Where padded rows go."""

REWRITING_MODES = frozenset({"DECODE", "EXTEND", "MIXED"})
"""Names of `ForwardMode`s that leave each request's state as of its last new token."""

GUARDED = ("conv", "temporal")
"""Fields of `MambaPool.State` that are the state itself; all others are scratch of one forward, or rings."""


class MambaStatePool(PoolAdapter):
    """A `MambaPool` as a region: ``conv.N`` and ``ssm.N`` of each layer N; several convolutions are numbered."""

    def __init__(self, pool: Any, layers: Sequence[int]) -> None:
        state = pool.mamba_cache
        sources: list[KVSource] = []
        for i, conv in enumerate(state.conv):
            half = "conv" if len(state.conv) == 1 else f"conv{i}"
            sources += _sources(half, conv, layers)
        sources += _sources("ssm", state.temporal, layers)
        if not sources:
            raise AttachError("neither a convolution's nor a recurrent state is in it")
        slots = min(source.tensor.shape[0] for source in sources)
        self._region = Region(REGION, slots, tuple(sources), RegionKind.STATE, null_slot=NULL_STATE)
        self._left_out = tuple(
            Uncovered(f"{REGION}/{name}", size, "scratch of speculative decoding and rings, not described")
            for name, value in vars(state).items()
            if name not in GUARDED and (size := _size(value))
        )

    def regions(self) -> Sequence[Region]:
        """The one."""
        return (self._region,)

    def uncovered(self) -> Sequence[Uncovered]:
        """What lies beside the states."""
        return self._left_out


def refusal(requests: Any) -> str | None:
    """Why the states of a `HybridReqToTokenPool` can't be guarded without false alarms, None if they can."""
    pool = requests.mamba_pool
    if type(pool).__name__ != "MambaPool":
        return f"{type(pool).__name__} is not a pool that this canary-sglang knows"
    if getattr(requests, "mamba_ckpt_pool", None) is not None:
        return "int8 checkpoints are turned into states inside the forward; not described"
    rings = ("replayssm_write_pos", "replayssm_spec_write_pos", "replayssm_cache_base")
    if any(getattr(pool, name, None) is not None for name in rings):
        return "ReplaySSM keeps a state's last updates in a ring beside it; not described"
    return None


class MambaStates(StepListener):
    """Where the requests' states are, for one runner, and what moves between them. ``region``: the name under which
    ``canary`` has them. Copies between slots carry its records until `close`. ``checkpoints``: None where forwards copy
    no states into checkpoint slots."""

    def __init__(self, requests: Any, region: str, canary: Canary, checkpoints: Checkpoints | None = None) -> None:
        self.region = region
        self._checkpoints = checkpoints
        self._canary = canary
        self._slots: Tensor = requests.req_index_to_mamba_index_mapping
        self._pool = requests.mamba_pool
        self._identity = torch.arange(requests.mamba_pool.size + 1, device=self._slots.device)
        _GUARDS[id(self._pool)] = self

    def close(self) -> None:
        """Copies are no longer followed."""
        _GUARDS.pop(id(self._pool), None)

    def before(self, batch: Any, view: BatchView | None) -> BatchView | None:
        """Adds the states that the forward reads and writes. A cached state that is reused must be of the very tokens
        whose KV is reused with it.

        A verification leaves the states to a later step, so they are not known any more. A request that reuses a cached
        state reads it from the cache's slot and writes its own: until the forward has copied it, there is nothing in
        the latter. A decode copies nothing, though the lists may still hold what the extend before it has copied.
        """
        if view is None or batch is None:
            return view
        if batch.forward_mode.name not in REWRITING_MODES:
            self._forget_requests(batch)
            return view
        if _reuses(batch):
            self._expect(batch, view)
            table = self._reusing(batch, view)
        else:
            table = self._own(batch.req_pool_indices)
        made = None if self._checkpoints is None else self._checkpoints.of_forward(batch, view.prefix_lens)
        if made is not None:
            table = replace(table, checkpoints=made)
        return replace(view, tables={**view.tables, self.region: table})

    def padding(self, view: BatchView) -> list[BatchView]:
        """``view``, of padding, with the tables of requests that go on, and of some that reuse a cached state."""
        numbers = torch.zeros(view.rows, dtype=torch.int64, device=self._slots.device)
        tables = self._own(numbers), _slot_lists(numbers, numbers, view, 0)
        return [replace(view, tables={**view.tables, self.region: table}) for table in tables]

    def forget(self, batch: Any) -> None:
        """The forward may have rewritten the states of its requests, and what follows it may copy some into checkpoint
        slots."""
        if batches.writes_kv(batch):
            self._forget_requests(batch)

    def _expect(self, batch: Any, view: BatchView) -> None:
        table = view.tables.get(KV)
        if table is not None:
            slots = table.entries[batch.req_pool_indices, (view.prefix_lens.long() - 1).clamp(min=0)]
            self._canary.slots.expect_prefix(self.region, KV, slots, view.prefix_lens, view.writers)

    def _forget_requests(self, batch: Any) -> None:
        self._canary.slots.forget(self.region, self._slots[batch.req_pool_indices])
        tracked = tracked_slots(batch)
        if tracked is not None:
            self._canary.slots.forget(self.region, tracked)

    def copied(self, sources: Tensor, destinations: Tensor) -> None:
        """The engine copied states."""
        self._canary.slots.copy(self.region, sources, destinations)

    def arrived(self, slots: Tensor) -> None:
        """States came from host memory."""
        self._canary.slots.forget(self.region, slots)

    def _own(self, requests: Tensor) -> SlotTable:
        return ring_table(slot_table(self._slots[:, None], requests), 1)

    def _reusing(self, batch: Any, view: BatchView) -> SlotTable:
        """A list of slots a row: the one to read, then one for each new token, of which only the last is written."""
        own = self._slots[batch.req_pool_indices].long()
        read = self._identity.clone()
        read[batch.mamba_cow_dst_indices.long()] = batch.mamba_cow_src_indices.long()
        return _slot_lists(read[own], own, view, batch.input_ids.shape[0])


_GUARDS: dict[int, MambaStates] = {}
"""By the identity of the `MambaPool` that they guard."""


def is_guarded(pool: Any) -> bool:
    """Whether some model's session guards this `MambaPool` already: a draft model is given the served model's."""
    return id(pool) in _GUARDS


def copied(result: Any, pool: Any, *args: Any, **kwargs: Any) -> None:
    """After ``MambaPool.copy_from(src_indices, dst_indices)``."""
    guard = _GUARDS.get(id(pool))
    if guard is not None:
        named = dict(zip(("src_indices", "dst_indices"), args, strict=False)) | kwargs
        guard.copied(named["src_indices"], named["dst_indices"])


def loaded(result: Any, pool: Any, *args: Any, **kwargs: Any) -> None:
    """After ``MambaPool.load_cpu_copy(mamba_cache_cpu, indices)``."""
    guard = _GUARDS.get(id(pool))
    if guard is not None:
        guard.arrived(args[1] if len(args) > 1 else kwargs["indices"])


def _slot_lists(read: Tensor, own: Tensor, view: BatchView, tokens: int) -> SlotTable:
    """For each row of ``view``, which has ``tokens`` new tokens in all: the slot to ``read``, then its ``own`` for each
    new token."""
    news = view.new_lens.long()
    ends = (news + 1).cumsum(0)
    first = ends - news - 1
    flat = own.new_full((tokens + own.shape[0],), -1)
    flat[first] = read
    flat[ends - 1] = own
    return replace(ragged_table(flat, first + 1 - view.prefix_lens.long()), stored_tokens=1)


def _reuses(batch: Any) -> bool:
    """Whether requests of a forward go on from cached states."""
    sources = batch.mamba_cow_src_indices
    return batch.forward_mode.name != "DECODE" and sources is not None and len(sources) > 0


def _sources(half: str, tensor: Tensor, layers: Sequence[int]) -> list[KVSource]:
    """One source a layer of a tensor ``[layers, slots, ...]``; none of an empty one."""
    if not tensor.numel():
        return []
    if tensor.shape[0] != len(layers):
        raise AttachError(f"{half} has {tensor.shape[0]} layers, the model {len(layers)}")
    return [row_source(tensor[i], Part(half, layer)) for i, layer in enumerate(layers)]


def _size(value: Any) -> int:
    tensors = value if isinstance(value, list) else [value]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)}
    return sum(storages.values())
