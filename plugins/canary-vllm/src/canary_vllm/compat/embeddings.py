"""The model's token embedding, for findings that equal embeddings explain."""

from typing import Any

from canary_adapters import EmbeddingPart


def part(runner: Any) -> EmbeddingPart | None:
    """What this rank has of the embedding, None where this rank or model has none."""
    return EmbeddingPart.of(_layer(runner), _group)


def _group(layer: Any) -> Any:
    """The ranks over which it is spread."""
    from vllm.distributed import get_tp_group

    # Newer releases have layers with a group of their own.
    return getattr(layer, "parallel_group", None) or get_tp_group()


def _layer(runner: Any) -> Any:
    """None where the model has it under another name."""
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
