"""The model's token embedding, for findings that equal embeddings explain."""

from typing import Any

from torch import Tensor


def row(runner: Any, token: int) -> Tensor | None:
    """The embedding of ``token``, None where this rank or model has none."""
    table = _table(runner)
    if table is None:
        return None
    first = int(getattr(getattr(table, "shard_indices", None), "org_vocab_start_index", 0))
    weight: Tensor = table.weight
    return weight[token - first] if first <= token < first + weight.shape[0] else None


def elsewhere(runner: Any, token: int) -> bool:
    """Whether the embedding of ``token`` is on another rank."""
    table = _table(runner)
    return table is not None and row(runner, token) is None


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
