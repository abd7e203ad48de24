"""The model's token embedding, for findings that equal embeddings explain."""

from typing import Any

from torch import Tensor

from canary_adapters import EmbeddingPart


def part(runner: Any) -> EmbeddingPart | None:
    """What this rank has of the embedding, None where this rank or model has none."""
    table = _table(runner)
    if table is None:
        return None
    shard = getattr(table, "shard_indices", None)
    if shard is None:
        return EmbeddingPart(table.weight)
    first, end = shard.org_vocab_start_index, shard.org_vocab_end_index
    group = _group(table)
    if group is None:
        return EmbeddingPart(table.weight[: end - first], first)
    return EmbeddingPart(table.weight[: end - first], first, group.ranks, group.rank_in_group)


def _group(table: Any) -> Any:
    """The ranks over which the layer is spread, None where it is not, or they are not known."""
    size = getattr(table, "tp_size", 1)
    if size == 1:
        return None
    try:
        from vllm.distributed import get_tp_group

        # Newer releases have layers with a group of their own.
        group = getattr(table, "parallel_group", None) or get_tp_group()
    except Exception:
        # An engine that ends gives its groups up.
        return None
    return group if group.world_size == size else None


def _table(runner: Any) -> Any:
    """The layer, None where the model has it under another name."""
    model = getattr(runner, "model", None)
    get = getattr(model, "get_input_embeddings", None)
    inner = getattr(model, "model", model)
    table = getattr(inner, "embed_tokens", None)
    if table is None and get is not None:
        try:
            table = get()
        except Exception:
            # It may want tokens to embed, and give them instead of the layer.
            return None
    return table if isinstance(getattr(table, "weight", None), Tensor) else None
