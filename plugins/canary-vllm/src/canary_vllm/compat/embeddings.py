"""The model's token embedding, for findings explained by equal embeddings."""

from typing import Any

from canary_adapters import EmbeddingPart


def part(runner: Any) -> EmbeddingPart | None:
    """The rank's part of the embedding, None where rank or model has none."""
    return EmbeddingPart.of(_layer(runner), _group)


def _group(layer: Any) -> Any:
    """The ranks with the parts."""
    from vllm.distributed import get_tp_group

    # Newer releases have layers with a group of their own.
    return getattr(layer, "parallel_group", None) or get_tp_group()


def _layer(runner: Any) -> Any:
    """The embedding's layer; None if named otherwise in the model."""
    model = getattr(runner, "model", None)
    get = getattr(model, "get_input_embeddings", None)
    layer = getattr(getattr(model, "model", model), "embed_tokens", None)
    if layer is None and get is not None:
        try:
            return get()
        except Exception:
            # It may want tokens to embed, and give them instead of the layer.
            return None
    return layer
