"""Attention of the model's layers, as one backend computes it for all.

MLA has two forms of calls. Absorbed: queries are brought into the space of compressed KV, the only head of keys, with
the values in the first numbers. Expanded, where no token of the batch has a prefix: keys and values of each head are
computed from compressed KV, stored before the call.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from canary_adapters import AttentionCalls, AttentionLayer, Operands, Projection, attention_layers
from canary_core import Region

NAMES = ("q", "k", "v", "layer", "forward_batch", "save_kv_cache")
"""Arguments of a backend's ``forward``, in order."""

ELSEWHERE = "its keys and values are stored, or its output is given, by another function than the backend's"


def calls(runner: Any, regions: Sequence[Region]) -> AttentionCalls:
    """Those of the served model. ``regions``: with the KV of its tokens."""
    projection = Projection()
    return AttentionCalls(
        partial(_layers, runner, regions),
        "forward",
        partial(_operands, projection),
        partial(_scales, runner),
        partial(_projecting, runner, projection),
    )


@contextlib.contextmanager
def _projecting(runner: Any, projection: Projection, number: int) -> Iterator[None]:
    """``projection`` sees the expansion of a layer's compressed KV meanwhile."""
    found = [
        module.kv_b_proj
        for module in runner.model.modules()
        if getattr(getattr(module, "attn_mha", None), "layer_id", None) == number and hasattr(module, "kv_b_proj")
    ]
    hooks = [module.register_forward_hook(projection) for module in found]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _layers(runner: Any, regions: Sequence[Region]) -> dict[int, AttentionLayer]:
    names = {region.name: sorted({str(source.layer) for source in region.sources}) for region in regions}
    owners = {name: runner.attn_backend for layers in names.values() for name in layers}
    return attention_layers(runner.model_config.hf_text_config, runner.model.named_parameters(), owners, names)


def _scales(runner: Any, number: int) -> tuple[float, float] | str:
    """Other backends quantize queries, too, read new tokens as they were before the store, or have scales."""
    backend = type(runner.attn_backend).__name__
    # It stores and reads without a scale, whichever the layer has.
    return (1.0, 1.0) if backend == "TorchNativeAttnBackend" else f"nobody has shown how {backend} reads it"


def _operands(projection: Projection, number: int, *args: Any, **kwargs: Any) -> Operands | str | None:
    """Also from within a graph that is captured piece by piece: attention is called between its pieces."""
    given = {**dict(zip(NAMES, args, strict=False)), **kwargs}
    layer: Any = given.get("layer")
    if getattr(layer, "layer_id", None) != number:
        return None
    operands: list[Any] = [given.get(name) for name in NAMES[:3]]
    if not all(isinstance(tensor, Tensor) for tensor in operands):
        return ELSEWHERE
    if given.get("q_rope") is not None:
        if given.get("cos_sin_cache") is not None:
            return "its kernel of attention rotates queries and keys"
        operands[:2] = _joined(layer, operands[0], given["q_rope"]), _joined(layer, operands[1], given["k_rope"])
    if layer.qk_head_dim != layer.v_head_dim and getattr(layer, "k_scale_float", None) not in (None, 1.0):
        return "its compressed KV is stored by a scale"
    q, k, v = operands
    q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
    k = k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim)
    v = v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim)
    if given.get("save_kv_cache", True):
        return Operands(q, k, v)
    expanded = projection.take(k, v)
    # A kernel of the rotation may store K and V by itself.
    return ELSEWHERE if expanded is None else Operands(q, k, v, expanded=expanded)


def _joined(layer: Any, plain: Tensor, rotated: Tensor) -> Tensor:
    """Both parts of a query or key of MLA."""
    dim = layer.qk_head_dim - layer.v_head_dim
    rotated = rotated.reshape(len(rotated), -1, dim)
    return torch.cat((plain.reshape(len(plain), -1, layer.v_head_dim), rotated), -1)
