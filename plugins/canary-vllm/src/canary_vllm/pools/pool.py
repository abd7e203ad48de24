"""A runner's KV cache as regions: one for each group of layers with a block table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from canary_adapters import (
    BlockGroup,
    JoinedPools,
    Part,
    ProbedLayouts,
    RegionPool,
    error_text,
    layer_numbers,
    probe_layout,
    row_source,
)
from canary_core import AttachError, KVSource, PoolAdapter, Region, RegionKind, Uncovered
from canary_vllm.compat import layers, runners

GUARDED = ("FullAttention", "MLA", "SlidingWindow", "Mamba", "CrossAttention", "ChunkedLocal")
"""Parts of the names of supported kinds of groups. Others keep and drop blocks in ways of their own: with such layers
in a group no forward is checked."""

HELD = ("tokens", "drafts", "encoder", "states")
"""Contents of groups, in the order of regions."""


@dataclass(frozen=True, slots=True)
class Group(BlockGroup):
    """One guarded group. ``page``: slots of an entry of its table. ``holds``: the KV of the served model's ``tokens``,
    of a draft model's layers (``drafts``), of an ``encoder``'s states, or recurrent ``states``, one a block.
    ``layers``: vLLM's names."""

    page: int = 1
    holds: str = "tokens"
    layers: tuple[str, ...] = ()


class VLLMPool(PoolAdapter):
    """The KV cache of one runner. Groups in the same memory, block by block, are regions of their own.

    ``groups``: the guarded ones, after `regions`.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._uncovered: list[Uncovered] = []
        self._layouts = ProbedLayouts()
        self._drafts = runners.draft_layers(runner)
        self.groups: list[Group] = []
        self._regions = tuple(self._describe())

    def regions(self) -> Sequence[Region]:
        """One for each group with a described layer."""
        return self._regions

    def uncovered(self) -> Sequence[Uncovered]:
        """Layers left out, each with the reason."""
        return self._uncovered

    def pool_tensors(self) -> Mapping[str, Tensor]:
        """Tensors bound by vLLM to its layers, by vLLM's names."""
        return {
            f"{name}[{i}]" if i else name: tensor
            for name, layer in runners.layers(self._runner).items()
            for i, tensor in enumerate(runners.layer_tensors(layer))
        }

    def _describe(self) -> Sequence[Region]:
        found: list[Region] = []
        for number, group in enumerate(runners.groups(self._runner)):
            drafts = [name for name in group.layer_names if name in self._drafts]
            for own in ([name for name in group.layer_names if name not in self._drafts], drafts):
                region = self._region(number, group.kv_cache_spec, own) if own else None
                if region is not None:
                    found.append(region)
        if not found:
            return ()
        # What sweeps and sampled tokens are told by comes first.
        self.groups.sort(key=lambda group: HELD.index(group.holds))
        order = [group.region for group in self.groups]
        found.sort(key=lambda region: order.index(region.name))
        names = frozenset(region.name for region in found)
        # Any block belongs to one group at a time.
        joined = JoinedPools([RegionPool(region) for region in found], sharing=[names])
        regions = joined.regions()
        self._uncovered += joined.uncovered()
        return regions

    def _region(self, number: int, spec: Any, names: Sequence[str]) -> Region | None:
        specs = getattr(spec, "kv_cache_specs", None) or {}
        # Layers that have another one's KV are named in the group and have no entry of their own.
        kinds = {type(one).__name__ for one in ([specs[name] for name in names if name in specs] or [spec])}
        reason = next((f"{k} is not guarded" for k in kinds if not any(known in k for known in GUARDED)), None)
        block = int(spec.block_size)
        if getattr(spec, "storage_block_size", block) != block:
            reason = "compressed KV is not guarded"
        holds = "drafts" if names[0] in self._drafts else "encoder" if kinds == {"CrossAttentionSpec"} else "tokens"
        holds = "states" if kinds == {"MambaSpec"} else holds
        if holds == "states":
            reason = layers.states_refusal(spec, runners.drafted(self._runner))
        elif holds == "drafts":
            reason = runners.drafts_refusal(self._runner)
        elif holds == "encoder" and runners.encoder_lens(self._runner) is None:
            reason = "how many states a request of this runner has is not known"
        if reason is not None:
            self._leave_out(names, reason)
            return None
        if holds == "states":
            return self._states(names, number, block if spec.mamba_cache_mode == "align" else 1)
        page = runners.table_page(self._runner, number)
        slots = int(self._runner.kv_cache_config.num_blocks) * block
        sources = tuple(self._sources(names, slots // page, page))
        if not sources:
            return None
        # A full group may have layers with a window, or with chunks: they read less of the same slots.
        chunked = kinds == {"ChunkedLocalAttentionSpec"}
        cut = "attention_chunk_size" if chunked else "sliding_window"
        window = getattr(next(iter(specs.values()), spec), cut, None)
        window = int(window) if window and (chunked or all("SlidingWindow" in kind for kind in kinds)) else None
        base = "chunk" if chunked else "window" if window else "full"
        name = self._name({"drafts": "draft", "encoder": "cross"}.get(holds, base), number)
        self.groups.append(Group(name, number, block, page, holds, tuple(names)))
        kind = RegionKind.WINDOW if window else RegionKind.FULL
        return Region(
            name, slots, sources, kind=kind, window_tokens=window, null_slot=0, null_slots=block,
            encoded=holds == "encoder", chunked=chunked,
        )  # fmt: skip

    def _name(self, base: str, number: int) -> str:
        return base if all(group.region != base for group in self.groups) else f"{base}.{number}"

    def _states(self, names: Sequence[str], number: int, page: int) -> Region:
        """The recurrent states of a group: each layer's tensors have a row for each block. ``page``: tokens after which
        a request goes on in another block, and the state before stays in the prefix cache; 1 for one block a
        request."""
        every, given = runners.layers(self._runner), layer_numbers(names)
        sources = [
            row_source(tensor, Part(half, given[name]))
            for name in names
            for half, tensor in layers.states(runners.layer_tensors(every.get(name)))
        ]
        region = self._name("state", number)
        self.groups.append(Group(region, number, block=1, page=page, holds="states"))
        blocks = int(self._runner.kv_cache_config.num_blocks)
        return Region(region, blocks, tuple(sources), kind=RegionKind.STATE, null_slot=0)

    def _sources(self, names: Sequence[str], pages: int, page: int) -> Iterator[KVSource]:
        every, given = runners.layers(self._runner), layer_numbers(names)
        for name in names:
            layer = every.get(name)
            tensors = runners.layer_tensors(layer)
            if layer is None or not tensors or getattr(layer, "kv_sharing_target_layer_name", None):
                continue
            try:
                with torch.inference_mode():
                    yield from self._sources_of(layer, tensors[0], pages, page, given[name])
            except AttachError as error:
                self._leave_out([name], f"its layout is not known: {error}")
            except Exception as error:
                self._leave_out([name], f"probing its layout failed: {error_text(error)}")

    def _sources_of(self, layer: Any, cache: Tensor, pages: int, page: int, number: int) -> Iterator[KVSource]:
        store = layers.Store.of(layer)
        stores = partial(store, dtype=self._runner.vllm_config.model_config.dtype)
        probe = partial(probe_layout, stores, store.halves, cache, pages, page)
        for piece in self._layouts.of((*store.sort, page), cache, probe):
            source = piece.source(cache, page, number, layers.element_type(layer, cache))
            yield replace(source, scaled=layers.scaled_type(layer, piece.chunk_bytes))

    def _leave_out(self, names: Sequence[str], reason: str) -> None:
        every = runners.layers(self._runner)
        for name in names:
            for tensor in runners.layer_tensors(every.get(name)):
                self._uncovered.append(Uncovered(name, tensor.nbytes, reason, tensor))
