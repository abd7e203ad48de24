"""A model's embedding of tokens, with a part on each tensor-parallel rank."""

from typing import Any

from canary_adapters import EmbeddingPart


def part(model: Any) -> EmbeddingPart | None:
    """This rank's part of the embedding; None without a known one."""
    layer = next((m for m in model.modules() if type(m).__name__ == "VocabParallelEmbedding"), None)
    return EmbeddingPart.of(layer, _group)


def _group(layer: Any) -> Any:
    """The ranks with the parts."""
    from sglang.srt.distributed import parallel_state

    # With data-parallel attention only the ranks that serve the same requests have parts of one embedding.
    attention = getattr(layer, "use_attn_tp_group", False)
    return parallel_state.get_attn_tp_group() if attention else parallel_state.get_tp_group()
