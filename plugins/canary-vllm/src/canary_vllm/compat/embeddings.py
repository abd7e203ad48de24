"""The model's token embedding, for findings explained by equal embeddings."""

from typing import Any

from canary_adapters import EmbeddingPart, embedding_layer


def part(runner: Any) -> EmbeddingPart | None:
    """The rank's part of the embedding, None where rank or model has none."""
    return EmbeddingPart.of(embedding_layer(getattr(runner, "model", None)), _group)


def _group(layer: Any) -> Any:
    """The ranks with the parts."""
    from vllm.distributed import get_tp_group

    # Newer releases have layers with a group of their own.
    return getattr(layer, "parallel_group", None) or get_tp_group()
