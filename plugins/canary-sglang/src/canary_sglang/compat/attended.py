"""Attention of the model's layers, as one backend computes it for all."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from canary_adapters import AttentionCalls, AttentionLayer, attention_layers
from canary_core import Region

NAMES = ("q", "k", "v", "layer", "forward_batch", "save_kv_cache")
"""Arguments of a backend's ``forward``, in order."""

ELSEWHERE = "its keys and values are stored, or its output is given, by another function than the backend's"


def calls(runner: Any, regions: Sequence[Region]) -> AttentionCalls:
    """Those of the served model. ``regions``: with the KV of its tokens."""
    return AttentionCalls(partial(_layers, runner, regions), "forward", _operands, partial(_scales, runner))


def _layers(runner: Any, regions: Sequence[Region]) -> dict[int, AttentionLayer]:
    names = {region.name: sorted({str(source.layer) for source in region.sources}) for region in regions}
    owners = {name: runner.attn_backend for layers in names.values() for name in layers}
    return attention_layers(runner.model_config.hf_text_config, runner.model.named_parameters(), owners, names)


def _scales(runner: Any, number: int) -> tuple[float, float] | str:
    """Other backends quantize queries, too, read new tokens as they were before the store, or have scales."""
    backend = type(runner.attn_backend).__name__
    # It stores and reads without a scale, whichever the layer has.
    return (1.0, 1.0) if backend == "TorchNativeAttnBackend" else f"nobody has shown how {backend} reads it"


def _operands(number: int, *args: Any, **kwargs: Any) -> Sequence[Tensor] | str:
    """Also from within a graph that is captured piece by piece: attention is called between its pieces."""
    given = {**dict(zip(NAMES, args, strict=False)), **kwargs}
    layer: Any = given.get("layer")
    if getattr(layer, "layer_id", None) != number:
        return ()
    operands: list[Any] = [given.get(name) for name in NAMES[:3]]
    # A kernel of the rotation may store K and V by itself.
    stores = given.get("save_kv_cache", True)
    if not stores or not all(isinstance(tensor, Tensor) for tensor in operands):
        return ELSEWHERE
    q, k, v = operands
    return (
        q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
        k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim),
        v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim),
    )
