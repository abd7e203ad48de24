"""An SGLang pool as regions: what is known is guarded, what isn't is named with the reason."""

from collections.abc import Mapping, Sequence
from typing import Any

from canary_adapters import JoinedPools, WindowPool
from canary_core import AttachError, PoolAdapter, Region, Uncovered
from canary_sglang.compat import runners
from canary_sglang.pools import compressor_state, mamba
from canary_sglang.pools.mxfp8_scales import interleaved_scales
from canary_sglang.pools.parts import NULL_SLOT, CompressedPool, Unguarded, tensor_bytes
from canary_sglang.pools.pool_kinds import compressed_sources, known_pool


class SGLangPool(PoolAdapter):
    """The pool of one `ModelRunner`, after it was allocated. Regions are named ``full``, ``swa``,
    ``c4``, ``c128``, ``c4_state`` and ``c128_state``.

    Pools are recognised by the exact name of their class, since a subclass may lay its tensors out in another way.
    """

    def __init__(self, runner: Any) -> None:
        self._pool = runner.token_to_kv_pool
        self._requests = getattr(runner, "req_to_token_pool", None)
        self._is_draft = bool(getattr(runner, "is_draft_worker", False))
        self._window_tokens = runners.window_tokens(runner)
        self._scales_refusal = runners.scales_refusal(runner)
        self._no_rings = runners.compressor_state_refusal(runner)
        self._joined = JoinedPools([*self._parts(), *self._states()])

    def regions(self) -> Sequence[Region]:
        """None if nothing of the pool is known; then `uncovered` says why."""
        return self._joined.regions()

    def uncovered(self) -> Sequence[Uncovered]:
        """What the regions leave out."""
        return self._joined.uncovered()

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
        """Recurrent states, which hybrid models keep beside the KV."""
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
        if reason is None:
            try:
                return [mamba.MambaStatePool(pool, list(requests.mamba_map)), *siblings]
            except AttachError as error:
                reason = f"{type(pool).__name__} is not as expected: {error}"
        return [Unguarded(mamba.REGION, tensor_bytes(pool), reason), *siblings]

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
            return [Unguarded(name, tensor_bytes(pool), f"{type(pool).__name__} without {lacks}")]
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
            *self._rings(),
        ]

    def _rings(self) -> list[PoolAdapter]:
        """What the compressors keep of tokens whose group is not complete."""
        found: list[PoolAdapter] = []
        for name, parts in compressor_state.by_region(self._pool).items():
            try:
                if self._no_rings is not None:
                    raise AttachError(self._no_rings)
                found.append(compressor_state.ring_pool(name, self._pool))
            except AttachError as error:
                found += _left_out(name, parts, str(error))
        return found

    def _minimax_sparse(self) -> list[PoolAdapter]:
        """K and V of all layers, and the indexer's K (of some layers V, too) with the same slots."""
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
        """A pool with one slot for ``ratio`` tokens; the indexer's keys have the same slots."""
        if pool is None or not pool.layer_num:
            return []
        layers = [i for i, r in enumerate(self._pool.compression_ratios) if r == ratio]
        try:
            return [CompressedPool(name, ratio, compressed_sources(pool, indexer, layers))]
        except AttachError as error:
            size = tensor_bytes(pool) + tensor_bytes(indexer)
            return [Unguarded(name, size, f"{type(pool).__name__} is not as expected: {error}")]


def _layers_of(mapping: Mapping[int, tuple[int, bool]]) -> tuple[list[int], list[int]]:
    """Model layers of the full and of the window pool, each in the order of the pool's tensors."""
    by_pool = [sorted((i, layer) for layer, (i, window) in mapping.items() if window is w) for w in (False, True)]
    full, window = ([layer for _, layer in pairs] for pairs in by_pool)
    return full, window


def _left_out(name: str, pool: Any, reason: str) -> list[PoolAdapter]:
    size = tensor_bytes(pool)
    return [Unguarded(name, size, reason)] if size else []
