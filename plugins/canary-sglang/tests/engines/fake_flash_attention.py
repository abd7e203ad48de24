"""FlashAttention-3 on a CPU: all of SGLang's backend but the kernels."""

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

WITH_KVCACHE = (
    "q", "k_cache", "v_cache", "k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx",
    "cache_leftpad", "page_table", "cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q", "rotary_seqlens", "q_descale",
    "k_descale", "v_descale", "softmax_scale", "causal", "window_size",
)  # fmt: skip
"""First parameters of the kernel that reads pages."""


def install() -> None:
    """FlashAttention-3's kernels need a GPU; SGLang's `FlashAttentionBackend`, which makes their page tables, doesn't.
    So the package of kernels is replaced by one whose attention is plain torch, which reads KV through the page table
    that it is given, and SGLang is told that the device could run it. To be called before a backend is made."""
    package, kernels = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.flash_attn")
    sys.modules["sgl_kernel"], sys.modules["sgl_kernel.flash_attn"] = package, kernels
    vars(package).update(flash_attn=kernels, merge_state_v2=merge_states, __path__=[])
    vars(kernels).update(
        flash_attn_varlen_func=attend_flat, flash_attn_with_kvcache=attend_pages, get_scheduler_metadata=plan
    )
    from sglang.srt.layers.attention import attention_registry

    attention_registry.get_device_capability = lambda: (9, 0)
    from sglang.kernels.ops.attention import flash_attention_v3

    flash_attention_v3._is_fa3_supported = lambda: True


def plan(batch_size: int, **_: Any) -> Tensor:
    """What splits the work of a decode: nothing here reads it."""
    return torch.zeros(batch_size + 1, dtype=torch.int32)


def attend_pages(*args: Any, **kwargs: Any) -> Any:
    """``flash_attn_with_kvcache``: attention of the queries ``q``, ``[tokens, heads, dim]``, of all rows to the
    positions that a row has in pages ``[pages, page_size, heads, dim]``; ``qv`` is that part of a query which meets the
    values (MLA)."""
    given = dict(zip(WITH_KVCACHE, args, strict=False)) | kwargs
    q, qv, table, ends = given["q"], given.get("qv"), given["page_table"], given["cu_seqlens_q"].tolist()
    size = given["v_cache"].shape[1]
    keys, values = given["k_cache"].flatten(0, 1), given["v_cache"].flatten(0, 1)
    rows = []
    for row, length in enumerate(given["cache_seqlens"].tolist()):
        places = torch.arange(length)
        slots = table[row, places // size].long() * size + places % size
        part = slice(ends[row], ends[row + 1])
        more = None if qv is None else qv[part]
        rows.append(_attend((q[part], more), keys[slots], values[slots], given))
    return _all(rows, given)


def attend_flat(**given: Any) -> Any:
    """``flash_attn_varlen_func``: attention to keys and values that lie one row after the other, without pages."""
    ends, limits = given["cu_seqlens_q"].tolist(), given["cu_seqlens_k"].tolist()
    rows = []
    for row in range(len(ends) - 1):
        part, read = slice(ends[row], ends[row + 1]), slice(limits[row], limits[row + 1])
        rows.append(_attend((given["q"][part], None), given["k"][read], given["v"][read], given))
    return _all(rows, given)


def merge_states(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two attentions ``[tokens, heads, dim]`` to different positions as one; ``lse``: ``[tokens, heads]``."""
    lse = torch.logaddexp(a_lse, b_lse)
    share = torch.exp(torch.stack([a_lse, b_lse]) - lse).nan_to_num()[..., None]
    return (a * share[0] + b * share[1]).to(a.dtype), lse


def _attend(
    queries: tuple[Tensor, Tensor | None], k: Tensor, v: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    q, qv = queries
    heads, size = q.shape[1], k.shape[0]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k)
    if qv is not None:
        scores += torch.einsum("qhd,khd->hqk", qv.float(), v)
    scores *= options["softmax_scale"]
    at, read = torch.arange(len(q))[:, None] + size - len(q), torch.arange(size)
    window = (options.get("window_size") or (-1, -1))[0]
    unseen = (read > at) if options["causal"] else torch.zeros(len(q), size, dtype=torch.bool)
    if window >= 0:
        unseen = unseen | (read < at - window)
    scores = scores.masked_fill(unseen, float("-inf"))
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(), v)
    return out.to(q.dtype), scores.logsumexp(-1)


def _all(rows: list[tuple[Tensor, Tensor]], options: dict[str, Any]) -> Any:
    out = torch.cat([o for o, _ in rows])
    return (out, torch.cat([s for _, s in rows], dim=1)) if options.get("return_softmax_lse") else out
