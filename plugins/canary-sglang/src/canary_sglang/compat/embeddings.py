"""A model's embedding of tokens. Each tensor-parallel rank has a part of it."""

from typing import Any

from canary_adapters import EmbeddingPart


def part(model: Any) -> EmbeddingPart | None:
    """What this rank has of the embedding; None where the model has none that is known."""
    layer = next((m for m in model.modules() if type(m).__name__ == "VocabParallelEmbedding"), None)
    return EmbeddingPart.of(layer, _group)


def _group(layer: Any) -> Any:
    """The ranks over which it is spread."""
    from sglang.srt.distributed import parallel_state

    # With data-parallel attention only the ranks that serve the same requests have parts of one embedding.
    attention = getattr(layer, "use_attn_tp_group", False)
    return parallel_state.get_attn_tp_group() if attention else parallel_state.get_tp_group()
