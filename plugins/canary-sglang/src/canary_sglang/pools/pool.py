"""An SGLang pool as regions. Memory that can't be guarded is named, with the reason."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from canary_adapters import JoinedPools, WindowPool
from canary_core import AttachError, PoolAdapter, Region, Uncovered, tensors_of
from canary_sglang.compat import runners
from canary_sglang.pools import compressor_state, mamba
from canary_sglang.pools.mxfp8_scales import interleaved_scales
from canary_sglang.pools.parts import NULL_SLOT, Unguarded, or_unguarded, tensor_bytes
from canary_sglang.pools.pool_kinds import compressed_pool, known_pool

_INDICES = (torch.int32, torch.int64, torch.uint32, torch.uint64, torch.bool)
"""SGLang's types of indices, addresses, lengths and flags; KV is floats, or bytes in their place."""

_WORKSPACES = ("dq_k_buffer", "dq_v_buffer")
"""Attributes of pools into which a forward unpacks quantized KV for itself."""

_ELSEWHERE = tuple(f"sglang.srt.{m}" for m in ("managers", "model_executor", "layers", "models", "mem_cache.pool_host"))
"""Modules of objects within reach of a pool, but no part of it."""


class SGLangPool(PoolAdapter):
    """The pool of one `ModelRunner`, after it was allocated.

    | region                   | slots of                                                        |
    |--------------------------|-----------------------------------------------------------------|
    | `full`                   | attention to all tokens                                         |
    | `full_scale`             | its MXFP8 scales where they are interleaved                     |
    | `swa`                    | sliding-window attention                                        |
    | `index_kv`, `index_k`    | MiniMax's indexer                                               |
    | `c4`, `c128`             | DeepSeek-V4's compressed tokens                                 |
    | `c4_state`, `c128_state` | DeepSeek-V4's compressor states                                 |
    | `mamba`                  | recurrent states                                                |

    Pools are recognised by the exact name of their class, since a subclass may arrange its tensors in another way.
    """

    def __init__(self, runner: Any) -> None:
        self._pool = runner.token_to_kv_pool
        self._requests = getattr(runner, "req_to_token_pool", None)
        self._is_draft = bool(getattr(runner, "is_draft_worker", False))
        self._window_tokens = runners.window_tokens(runner)
        self._scales_refusal = runners.scales_refusal(runner)
        self._compressor_refusal = runners.compressor_state_refusal(runner)
        self._joined = JoinedPools([*self._parts(), *self._states()])

    def regions(self) -> Sequence[Region]:
        """Empty if no part of the pool is known; then `uncovered` says why. Raises `AttachError` if two regions have
        one name or share bytes."""
        return self._joined.regions()

    def uncovered(self) -> Sequence[Uncovered]:
        """Memory outside of all regions."""
        return self._joined.uncovered()

    def pool_tensors(self) -> Mapping[str, Tensor]:
        """Tensors of SGLang's own objects: the runner's pool with all pools within, and, for the served model, the pool
        of requests, with the recurrent states. Not KV are tensors of whole numbers of 32 bits or more and of truth
        values (`req_to_token`, maps between pools, addresses of buffers, free lists), and tensors on another device
        (copies in host memory). None where SGLang only reserves addresses (post-capture KV): behind the end of the pool
        there is no memory."""
        if getattr(self._pool, "post_capture_active", False):
            return {}
        held = {"token_to_kv_pool": self._pool}
        if self._requests is not None and not self._is_draft:
            held["req_to_token_pool"] = self._requests
        return {name: t for root, thing in held.items() for name, t in _named_after(root, tensors_of(thing, _no_kv))}

    def _parts(self) -> list[PoolAdapter]:
        pool, kind = self._pool, type(self._pool).__name__
        if kind == "SWAKVPool":
            full, window = _layers_of(pool.layers_mapping)
            return [
                *self._full(pool.full_kv_pool, full),
                *self._windowed("swa", pool.swa_kv_pool, window),
            ]
        if kind == "HybridLinearKVPool":
            layers = sorted(pool.full_attention_layer_id_mapping, key=pool.full_attention_layer_id_mapping.get)
            return self._full(pool.full_kv_pool, layers)
        if kind == "MiniMaxSparseKVPool":
            return self._minimax_sparse()
        if kind == "DeepSeekV4TokenToKVPool":
            return self._deepseek_v4()
        return self._full(pool, None)

    def _states(self) -> list[PoolAdapter]:
        """Recurrent states, beside the KV of hybrid models."""
        requests = self._requests
        pool = getattr(requests, "mamba_pool", None)
        if requests is None or pool is None or mamba.is_guarded(pool):
            return []
        siblings = [
            item
            for name in ("short_conv_pool", "ngram_pool")
            for item in _left_out(f"{mamba.REGION}/{name}", getattr(requests, name, None), "not described yet")
        ]
        reason = "a draft model's states" if self._is_draft else mamba.refusal(requests)
        if reason is not None:
            return [Unguarded(mamba.REGION, tensor_bytes(pool), reason, pool), *siblings]
        return [or_unguarded(mamba.REGION, pool, lambda: mamba.state_pool(pool, list(requests.mamba_map))), *siblings]

    def _full(self, pool: Any, layers: Sequence[int] | None) -> list[PoolAdapter]:
        if not pool.layer_num:
            return []
        return [known_pool("full", pool, layers), *interleaved_scales(pool, layers, self._scales_refusal)]

    def _windowed(self, name: str, pool: Any, layers: Sequence[int] | None) -> list[PoolAdapter]:
        if not pool.layer_num:
            return []
        slot_map = self._pool.full_to_swa_index_mapping
        if self._window_tokens is None or slot_map is None:
            lacks = "a window length" if self._window_tokens is None else "a map from full slots"
            return [Unguarded(name, tensor_bytes(pool), f"{type(pool).__name__} without {lacks}", pool)]
        window = WindowPool(known_pool(name, pool, layers), self._window_tokens, slot_map, NULL_SLOT)
        return [window, *interleaved_scales(pool, layers, "interleaved scales of a window; not described")]

    def _deepseek_v4(self) -> list[PoolAdapter]:
        pool = self._pool
        if getattr(pool, "swa_kv_pool", None) is None:
            return [Unguarded("pool", tensor_bytes(pool), "DeepSeek-V4's unified and request-window layouts")]
        indexer = getattr(pool, "c4_indexer_kv_pool", None)
        return [
            *self._windowed("swa", pool.swa_kv_pool, None),
            *self._compressed("c4", 4, getattr(pool, "c4_kv_pool", None), indexer),
            *self._compressed("c128", 128, getattr(pool, "c128_kv_pool", None), None),
            *self._compressor_states(),
        ]

    def _compressor_states(self) -> list[PoolAdapter]:
        found: list[PoolAdapter] = []
        for name, pools in compressor_state.by_region(self._pool).items():
            try:
                if self._compressor_refusal is not None:
                    raise AttachError(self._compressor_refusal)
                found.append(compressor_state.compressor_state_pool(name, self._pool))
            except AttachError as error:
                found += _left_out(name, pools, str(error))
        return found

    def _minimax_sparse(self) -> list[PoolAdapter]:
        """K and V of all layers, and the indexer's K (in some layers its V, too), with the same slots."""
        pool = self._pool
        if getattr(pool, "dense_pool", None) is not None:
            return [Unguarded("pool", tensor_bytes(pool), "MiniMax's sparse pool with HiSparse")]
        return [
            *self._full(pool.main_pool, None),
            *(
                known_pool(name, sub, list(mapping))
                for name, sub, mapping in (
                    ("index_kv", pool.index_kv_pool, pool.index_kv_layer_id_mapping),
                    ("index_k", pool.index_k_pool, pool.index_k_layer_id_mapping),
                )
                if sub is not None
            ),
        ]

    def _compressed(self, name: str, ratio: int, pool: Any, indexer: Any) -> list[PoolAdapter]:
        if pool is None or not pool.layer_num:
            return []
        layers = [i for i, r in enumerate(self._pool.compression_ratios) if r == ratio]
        return [or_unguarded(name, pool, lambda: compressed_pool(name, pool, indexer, layers, ratio), [pool, indexer])]


def _layers_of(mapping: Mapping[int, tuple[int, bool]]) -> tuple[list[int], list[int]]:
    """Model layers of the full and of the window pool, each in the order of the pool's tensors. ``mapping``: by model
    layer, the index of its tensor and whether it has a window."""
    by_pool = [sorted((i, layer) for layer, (i, window) in mapping.items() if window is w) for w in (False, True)]
    full, window = ([layer for _, layer in pairs] for pairs in by_pool)
    return full, window


def _no_kv(name: str, held: object) -> bool:
    """Whether an object is a tensor without KV, or leads to the engine's other parts."""
    if isinstance(held, Tensor):
        return held.dtype in _INDICES or name.rpartition(".")[2].partition("[")[0] in _WORKSPACES
    return type(held).__module__.startswith(_ELSEWHERE)


def _named_after(root: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    devices = [t.device for t in tensors.values()]
    device = max(set(devices), key=lambda d: (d.type != "cpu", devices.count(d)), default=None)
    return ((f"{root}.{name}", t) for name, t in tensors.items() if t.device == device)


def _left_out(name: str, pool: Any, reason: str) -> list[PoolAdapter]:
    size = tensor_bytes(pool)
    return [Unguarded(name, size, reason, pool)] if size else []
