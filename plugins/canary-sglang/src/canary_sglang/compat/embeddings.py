"""A model's embedding of tokens. Each tensor-parallel rank has a part of it."""

from typing import Any

from torch import Tensor

from canary_adapters import EmbeddingPart


def part(model: Any) -> EmbeddingPart | None:
    """What this rank has of the embedding; None where the model has none that is known."""
    embedding = _embedding(model)
    weight, shard = (getattr(embedding, name, None) for name in ("weight", "shard_indices"))
    if not isinstance(weight, Tensor):
        return None
    if shard is None:
        return EmbeddingPart(weight)
    first, end = shard.org_vocab_start_index, shard.org_vocab_end_index
    group = _group(embedding)
    if group is None:
        return EmbeddingPart(weight[: end - first], first)
    return EmbeddingPart(weight[: end - first], first, group.ranks, group.rank_in_group)


def _group(embedding: Any) -> Any:
    """The ranks over which it is spread, None where it is not, or they are not known."""
    size = getattr(embedding, "tp_size", 1)
    if size == 1:
        return None
    try:
        from sglang.srt.distributed import parallel_state

        # With data-parallel attention only the ranks that serve the same requests have parts of one embedding.
        attention = getattr(embedding, "use_attn_tp_group", False)
        group = parallel_state.get_attn_tp_group() if attention else parallel_state.get_tp_group()
    except Exception:
        # An engine that ends gives its groups up.
        return None
    return group if group.world_size == size else None


def _embedding(model: Any) -> Any:
    return next((m for m in model.modules() if type(m).__name__ == "VocabParallelEmbedding"), None)
