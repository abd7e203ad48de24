"""Recurrent states of hybrid models (Mamba, linear attention, short convolutions): the region ``mamba``. A request has
one slot, rewritten by every forward.

SGLang stores the states in a `MambaPool` beside the KV pool. ``req_index_to_mamba_index_mapping`` gives the slot of a
request; the prefix cache has slots of its own. SGLang copies states between slots in two ways, and Canary copies the
records along. ``copy_from`` copies the state of an unfinished request into the cache. When a request reuses a cached
state, the `ForwardBatch` names both slots, and the forward clones the state before its layers read it: then the content
of the request's slot is compared with the cached slot's. With ``extra_buffer`` forwards also copy states into
checkpoint slots: see `canary_sglang.compat.state_checkpoints`.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from canary_adapters import Part, RegionPool, ragged_table, ring_table, row_source, slot_table
from canary_core import (
    AttachError,
    BatchView,
    Canary,
    KVSource,
    Region,
    RegionKind,
    SlotTable,
    StepListener,
)
from canary_sglang.compat import batches, runners
from canary_sglang.compat.state_checkpoints import Checkpoints, tracked_slots
from canary_sglang.pools.parts import left_out

REGION = "mamba"

KV = "full"
"""The region with the KV of the same tokens."""

NULL_STATE = 0
"""The slot of padded rows."""

REWRITING_MODES = frozenset({"DECODE", "EXTEND", "MIXED"})
"""Names of `ForwardMode` values after which a request's state belongs to the last new token."""

STATE_FIELDS = ("conv", "temporal")
"""Fields of `MambaPool.State` with the state itself. All others are scratch memory of one forward, or rings."""


def state_pool(pool: Any, layers: Sequence[int]) -> RegionPool:
    """A `MambaPool` as a region, with ``conv.N`` and ``ssm.N`` for each layer N; several convolutions are numbered.
    Raises `AttachError` if there is no state, or not one for each of ``layers``."""
    state = pool.mamba_cache
    sources: list[KVSource] = []
    for i, conv in enumerate(state.conv):
        half = "conv" if len(state.conv) == 1 else f"conv{i}"
        sources += _sources(half, conv, layers)
    sources += _sources("ssm", state.temporal, layers)
    if not sources:
        raise AttachError("neither a convolution's nor a recurrent state is in it")
    slots = min(source.tensor.shape[0] for source in sources)
    rest = (
        item
        for name, value in vars(state).items()
        if name not in STATE_FIELDS
        for item in left_out(f"{REGION}/{name}", value, "scratch of speculative decoding and rings, not described")
    )
    return RegionPool(Region(REGION, slots, tuple(sources), RegionKind.STATE, null_slot=NULL_STATE), rest)


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


def recompute_refusal(runner: Any) -> str | None:
    """Why no request of a model with states can be computed again; None where it can, or for a model without."""
    requests = runner.req_to_token_pool
    if not hasattr(requests, "mamba_pool"):
        return None
    if runners.speculates(runner):
        return "with speculation beside recurrent states nothing is computed again: what is accepted was not compared"
    why = refusal(requests)
    return None if why is None else f"with these recurrent states nothing is computed again: {why}"


class MambaStates(StepListener):
    """Adds the requests' states to the view of each forward, and until `close` copies records when SGLang copies states
    between slots. ``requests``: the runner's `HybridReqToTokenPool`. ``region``: the states' name in ``canary``.
    ``checkpoints``: None where forwards copy no states into checkpoint slots."""

    def __init__(self, requests: Any, region: str, canary: Canary, checkpoints: Checkpoints | None = None) -> None:
        self.region = region
        self._checkpoints = checkpoints
        self._canary = canary
        self._slots: Tensor = requests.req_index_to_mamba_index_mapping
        self._pool = requests.mamba_pool
        self._identity = torch.arange(requests.mamba_pool.size + 1, device=self._slots.device)
        # Cached states that the forward has to clone and where to, until it was seen to.
        self._due: tuple[Tensor, Tensor] | None = None
        self._cloning = False
        _STATES_BY_POOL[id(self._pool)] = self

    def close(self) -> None:
        """From now on, copies between slots are ignored."""
        _STATES_BY_POOL.pop(id(self._pool), None)

    def before(self, batch: Any, view: BatchView | None) -> BatchView | None:
        """Adds the states read and written by the forward. A cached state must have the prefix hash of the KV reused
        beside it.

        SGLang updates the states some time after a verification, so the verification makes them unknown. A request with
        a reused cached state reads the cache's slot, since its own slot is empty until the forward has copied the state
        there. A decode copies no states, but its batch may still have the lists of the extend before.
        """
        self._due = None
        if view is None or batch is None:
            return view
        if batch.forward_mode.name not in REWRITING_MODES:
            self._forget_requests(batch)
            return view
        if _reuses(batch):
            self._expect(batch, view)
            table = self._reusing(batch, view)
            self._due = batch.mamba_cow_src_indices, batch.mamba_cow_dst_indices
        else:
            table = self._own(batch.req_pool_indices)
        made = None if self._checkpoints is None else self._checkpoints.of_forward(batch, view.prefix_lens)
        if made is not None:
            table = replace(table, checkpoints=made)
        return replace(view, tables={**view.tables, self.region: table})

    def after(self, batch: Any, view: BatchView | None) -> None:
        """Judges a cached state without a seen clone: the forward went on from the old content of its request's slot,
        unlike the cached one."""
        if self._due is not None and view is not None:
            self.cloned(*self._due)

    def padding(self, view: BatchView) -> list[BatchView]:
        """``view``, with only padding, twice: with the table of continuing requests, and with that of requests with a
        reused cached state."""
        numbers = torch.zeros(view.rows, dtype=torch.int64, device=self._slots.device)
        tables = self._own(numbers), _slot_lists(numbers, numbers, view, 0)
        return [replace(view, tables={**view.tables, self.region: table}) for table in tables]

    def forget(self, batch: Any) -> None:
        """The forward may have rewritten the states of its requests; SGLang may copy some of them into checkpoint slots
        afterwards."""
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
        """SGLang copied states from slots ``sources`` to slots ``destinations``, possibly one number each."""
        if not self._cloning:
            self._due = None
            self._canary.slots.copy(self.region, self._listed(sources), self._listed(destinations))

    @contextlib.contextmanager
    def cloning(self) -> Iterator[None]:
        """Context: copies within are those of `cloned`."""
        self._cloning = True
        try:
            yield
        finally:
            self._cloning = False

    def cloned(self, sources: Tensor, destinations: Tensor) -> None:
        """SGLang should have cloned the states ``sources`` to ``destinations`` by now: compares the slots."""
        self._due = None
        self._canary.slots.copy(self.region, self._listed(sources), self._listed(destinations), check=True)

    def loaded(self, slots: Tensor) -> None:
        """SGLang loaded states from host memory to ``slots``."""
        self._canary.slots.forget(self.region, self._listed(slots))

    def _listed(self, slots: Tensor) -> Tensor:
        """``slots`` in the form of `SlotEvents`: ``[n]``, on the pool's device."""
        return slots.reshape(-1).to(self._slots.device)

    def _own(self, requests: Tensor) -> SlotTable:
        return ring_table(slot_table(self._slots[:, None], requests), 1)

    def _reusing(self, batch: Any, view: BatchView) -> SlotTable:
        """For each row a list of slots: the one to read, then one for each new token. Only the last one is written."""
        own = self._slots[batch.req_pool_indices].long()
        read = self._identity.clone()
        read[batch.mamba_cow_dst_indices.long()] = batch.mamba_cow_src_indices.long()
        return _slot_lists(read[own], own, view, batch.input_ids.shape[0])


_STATES_BY_POOL: dict[int, MambaStates] = {}
"""By ``id()`` of the `MambaPool`."""


def is_guarded(pool: Any) -> bool:
    """Whether a session guards the `MambaPool` already: a draft model has the served model's."""
    return id(pool) in _STATES_BY_POOL


def copied(result: Any, pool: Any, *args: Any, **kwargs: Any) -> None:
    """After ``MambaPool.copy_from(src_indices, dst_indices)``."""
    states = _STATES_BY_POOL.get(id(pool))
    if states is not None:
        named = dict(zip(("src_indices", "dst_indices"), args, strict=False)) | kwargs
        states.copied(named["src_indices"], named["dst_indices"])


def cloned(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``ModelRunner._maybe_execute_deferred_mamba_cow_and_clear(forward_batch)``, which clones cached states and
    then takes their numbers out of the batch; in some forwards both are left alone."""
    states = _STATES_BY_POOL.get(id(getattr(runner.req_to_token_pool, "mamba_pool", None)))
    batch = args[0] if args else kwargs["forward_batch"]
    sources, destinations = batch.mamba_cow_src_indices, batch.mamba_cow_dst_indices
    if states is None or sources is None or not len(sources):
        return original(runner, *args, **kwargs)
    with states.cloning():
        result = original(runner, *args, **kwargs)
    if batch.mamba_cow_src_indices is None:
        states.cloned(sources, destinations)
    return result


def loaded(result: Any, pool: Any, *args: Any, **kwargs: Any) -> None:
    """After ``MambaPool.load_cpu_copy(mamba_cache_cpu, indices)``."""
    states = _STATES_BY_POOL.get(id(pool))
    if states is not None:
        states.loaded(args[1] if len(args) > 1 else kwargs["indices"])


def _slot_lists(read: Tensor, own: Tensor, view: BatchView, tokens: int) -> SlotTable:
    """A table with a list of slots for each row of ``view``: the slot to ``read``, then the row's ``own`` slot for each
    new token. ``read`` and ``own``: int64 ``[rows]``. ``tokens``: new tokens of all rows."""
    new_lens = view.new_lens.long()
    ends = (new_lens + 1).cumsum(0)
    first = ends - new_lens - 1
    flat = own.new_full((tokens + own.shape[0],), -1)
    flat[first] = read
    flat[ends - 1] = own
    return replace(ragged_table(flat, first + 1 - view.prefix_lens.long()), stored_tokens=1)


def _reuses(batch: Any) -> bool:
    """Whether requests of a forward continue from cached states."""
    sources = batch.mamba_cow_src_indices
    return batch.forward_mode.name != "DECODE" and sources is not None and len(sources) > 0


def _sources(half: str, tensor: Tensor, layers: Sequence[int]) -> list[KVSource]:
    """One source for each layer of a tensor ``[layers, slots, ...]``; none for an empty one. Raises `AttachError` for
    another number of layers."""
    if not tensor.numel():
        return []
    if tensor.shape[0] != len(layers):
        raise AttachError(f"{half} has {tensor.shape[0]} layers, the model {len(layers)}")
    return [row_source(tensor[i], Part(half, layer)) for i, layer in enumerate(layers)]
