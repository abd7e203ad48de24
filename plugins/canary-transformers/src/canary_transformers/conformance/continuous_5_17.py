"""`ContinuousSession517`: the same on Transformers 5.17, with a cache of groups of equally many layers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from canary_transformers.conformance.continuous import (
    HALVES,
    LAYERS,
    PAGE_TOKENS,
    POOL_TOKENS,
    WINDOW_TOKENS,
    ContinuousSession,
    ModelName,
)


class ContinuousSession517(ContinuousSession):
    """Each group has block tables of its own; layers at the same place of their groups share a tensor."""

    def _engine_options(self, model: ModelName) -> dict[str, Any]:
        # A block is one of a group's layers. An engine that is too tight gives up.
        groups = 1 if model == "llama" else LAYERS
        return {"block_size": PAGE_TOKENS, "num_blocks": 2 * groups * POOL_TOKENS // PAGE_TOKENS}

    def pool_tensors(self) -> Mapping[str, Tensor]:
        """One of K and one of V for each layer of a group."""
        caches = {"key_cache": self._cache.key_cache, "value_cache": self._cache.value_cache}
        return {f"{name}[{i}]": tensor for name, tensors in caches.items() for i, tensor in enumerate(tensors)}

    def poke(self, layer: int, half: str, request: str, position: int) -> None:
        """Flips a bit, found through the block table of the layer's group; a window is a ring of the last tokens."""
        group, place = self._cache.layer_index_to_group_indices[layer]
        manager = self._cache.group_cache_managers[group]
        ring = position % WINDOW_TOKENS if hasattr(manager, "sliding_window") else position
        slot = manager.block_table[request][ring // PAGE_TOKENS] * PAGE_TOKENS + ring % PAGE_TOKENS
        tensor = (self._cache.key_cache, self._cache.value_cache)[HALVES.index(half)][place]
        tensor.view(torch.uint8)[slot, 0, 2] ^= 16

    def _fork_blocks(self, state: Any, child: str) -> None:
        source, destination = self._cache.fork_request(state.request_id, [child])
        if source:
            self._cache.copy_cache(source, destination)

    def _first_slots(self, request: str) -> list[int]:
        return [manager.block_table[request][0] * PAGE_TOKENS for manager in self._cache.group_cache_managers]
