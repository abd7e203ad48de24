"""Metadata given to the attention layers for one forward."""

import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from canary_adapters import GivenBlocks, metadata_blocks
from canary_core import Canary
from canary_vllm.pools.pool import Group


def given(runner: Any, canary: Canary, group: Group, metadata: Any) -> Iterable[GivenBlocks]:
    """The tables and lengths of ``group``'s layers, for the forward issued now, or just issued. ``metadata``: by layer,
    None for that in vLLM's forward context, or kept by a V2 runner. Empty where a batch is run in parts."""
    forward, tables = pkgutil.resolve_name("vllm.forward_context"), canary.step.tables
    context = forward.get_forward_context() if forward.is_forward_context_available() else None
    kept = getattr(runner, "execute_model_state", None)
    metadata = metadata or getattr(context, "attn_metadata", None) or getattr(kept, "attn_metadata", None)
    mapping = getattr(context, "slot_mapping", None) or getattr(kept, "slot_mappings_by_layer", None)
    split = any(getattr(one, "kernel_block_size", None) for one in runner.attn_groups[group.number])
    if split:
        tables.leave_out(group.region, "its blocks are split for the kernels")
    if isinstance(metadata, Mapping):
        layers = runner.kv_cache_config.kv_cache_groups[group.number].layer_names
        make = partial(
            GivenBlocks, region=group.region, group=group.number, page_slots=group.page, block_slots=group.block
        )
        found = metadata_blocks(metadata, layers, mapping, make, tables.leave_out)
        return [replace(one, entries=None) for one in found] if split else found
    return ()
