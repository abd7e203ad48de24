"""A runner's KV cache as regions: one for each group of layers that have a block table of their own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from canary_adapters import JoinedPools, Part, RegionPool, row_source
from canary_core import AttachError, KVSource, PoolAdapter, Region, RegionKind, Uncovered
from canary_vllm.compat import layers, runners
from canary_vllm.pools.layout import Layouts

UNGUARDED = {
    "CrossAttentionSpec": "the KV of an encoder is not guarded",
    "ChunkedLocalAttentionSpec": "chunked local attention is not guarded",
    "CircularBufferSpec": "circular buffers are not guarded",
    "HiSparseHotSpec": "HiSparse's copies are not guarded",
    "HiSparseResidentSpec": "HiSparse's copies are not guarded",
    "HiddenStateCacheSpec": "hidden states are not guarded",
}
"""Kinds of groups of which no forward is checked, and why."""


@dataclass(frozen=True, slots=True)
class Group:
    """One guarded group: its region's name, its number, slots of a block of the scheduler, and of an entry of its
    table. ``states``: it holds a recurrent state of each request, one a block, not tokens."""

    region: str
    number: int
    block: int
    page: int
    states: bool = False


class VLLMPool(PoolAdapter):
    """The KV cache of one runner. Groups that share the same memory block by block are regions of their own.

    ``groups``: those that are guarded, after `regions`.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._uncovered: list[Uncovered] = []
        self._layouts = Layouts(runner.vllm_config.model_config.dtype)
        self._drafts = runners.draft_layers(runner)
        self.groups: list[Group] = []
        self._regions = tuple(self._describe())

    def regions(self) -> Sequence[Region]:
        """One for each group of which a layer can be described."""
        return self._regions

    def uncovered(self) -> Sequence[Uncovered]:
        """Layers that are left out, each with the reason."""
        return self._uncovered

    def pool_tensors(self) -> Mapping[str, Tensor]:
        """What vLLM has bound to its layers, by its names of them."""
        return {
            f"{name}[{i}]" if i else name: tensor
            for name, layer in runners.layers(self._runner).items()
            for i, tensor in enumerate(runners.layer_tensors(layer))
        }

    def _describe(self) -> Sequence[Region]:
        found: list[Region] = []
        for number, group in enumerate(runners.groups(self._runner)):
            region = self._region(number, group, [region.name for region in found])
            if region is not None:
                found.append(region)
        if not found:
            return ()
        # The token regions are what a forward is told by.
        found.sort(key=lambda region: region.kind is RegionKind.STATE)
        self.groups.sort(key=lambda group: group.states)
        names = frozenset(region.name for region in found)
        # Any block belongs to one group at a time.
        joined = JoinedPools([RegionPool(region) for region in found], sharing=[names])
        regions = joined.regions()
        self._uncovered += joined.uncovered()
        return regions

    def _region(self, number: int, group: Any, taken: Sequence[str]) -> Region | None:
        spec, names = group.kv_cache_spec, list(group.layer_names)
        specs = getattr(spec, "kv_cache_specs", None) or {}
        kinds = {type(specs.get(name, spec)).__name__ for name in names}
        reason = next((UNGUARDED[kind] for kind in kinds if kind in UNGUARDED), None)
        block = int(spec.block_size)
        if getattr(spec, "storage_block_size", block) != block:
            reason = "compressed KV is not guarded"
        states = kinds == {"MambaSpec"}
        if states:
            reason = layers.states_refusal(spec, runners.drafted(self._runner))
        if reason is not None:
            self._leave_out(names, reason)
            return None
        if states:
            return self._states(names, number, "state" if "state" not in taken else f"state.{number}")
        page = runners.table_page(self._runner, number)
        slots = int(self._runner.kv_cache_config.num_blocks) * block
        sources = tuple(self._sources(names, slots // page, page))
        if not sources:
            return None
        window = getattr(next(iter(specs.values()), spec), "sliding_window", None)
        # A full group may have layers with a window: they read less of the same slots.
        window = window if "SlidingWindow" in next(iter(kinds)) else None
        base = "window" if window else "full"
        name = base if base not in taken else f"{base}.{number}"
        self.groups.append(Group(name, number, block, page))
        return Region(
            name,
            slots,
            sources,
            kind=RegionKind.WINDOW if window else RegionKind.FULL,
            window_tokens=int(window) if window else None,
            null_slot=0,
            null_slots=block,
        )

    def _states(self, names: Sequence[str], number: int, region: str) -> Region:
        """The recurrent states of a group: each layer's tensors have a row for each block."""
        every, given = runners.layers(self._runner), layers.numbers(names)
        sources = [
            row_source(tensor, Part(half, given[name]))
            for name in names
            for half, tensor in layers.states(runners.layer_tensors(every.get(name)))
        ]
        self.groups.append(Group(region, number, block=1, page=1, states=True))
        blocks = int(self._runner.kv_cache_config.num_blocks)
        return Region(region, blocks, tuple(sources), kind=RegionKind.STATE, null_slot=0)

    def _sources(self, names: Sequence[str], pages: int, page: int) -> Iterator[KVSource]:
        every, given = runners.layers(self._runner), layers.numbers(names)
        for name in names:
            layer = every.get(name)
            tensors = runners.layer_tensors(layer)
            if layer is None or not tensors or getattr(layer, "kv_sharing_target_layer_name", None):
                continue
            if name in self._drafts:
                self._leave_out([name], "layers of a draft model are not guarded")
                continue
            try:
                with torch.inference_mode():
                    yield from self._layouts.sources(layer, tensors[0], pages, page, given[name])
            except AttachError as error:
                self._leave_out([name], f"its layout is not known: {error}")
            except Exception as error:
                self._leave_out([name], f"probing its layout failed: {type(error).__name__}: {error}")

    def _leave_out(self, names: Sequence[str], reason: str) -> None:
        every = runners.layers(self._runner)
        for name in names:
            for tensor in runners.layer_tensors(every.get(name)):
                self._uncovered.append(Uncovered(name, tensor.nbytes, reason, tensor))
