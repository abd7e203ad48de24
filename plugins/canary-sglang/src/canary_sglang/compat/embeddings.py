"""A model's embedding of tokens. Each tensor-parallel rank has a part of it."""

from typing import Any

from torch import Tensor


def row(model: Any, token: int) -> Tensor | None:
    """The embedding of ``token``; None if this rank does not have it."""
    embedding = _embedding(model)
    weight = getattr(embedding, "weight", None)
    if not isinstance(weight, Tensor):
        return None
    place = token - int(getattr(getattr(embedding, "shard_indices", None), "org_vocab_start_index", 0))
    return weight[place].detach() if 0 <= place < weight.shape[0] else None


def elsewhere(model: Any, token: int) -> bool:
    """Whether another rank has the embedding of ``token``."""
    shard = getattr(_embedding(model), "shard_indices", None)
    return shard is not None and not shard.org_vocab_start_index <= token < shard.org_vocab_end_index


def _embedding(model: Any) -> Any:
    return next((m for m in model.modules() if type(m).__name__ == "VocabParallelEmbedding"), None)
