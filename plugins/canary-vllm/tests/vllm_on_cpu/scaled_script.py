"""Numbers stored by vLLM's Triton backend with scales per token and head, and found again where Canary reads them.

TRITON_INTERPRET=1 python -m vllm_on_cpu.scaled_script
"""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends import backends

HEADS, SIZE, PAGE, BLOCKS = 2, 64, 16, 5
TYPES = {"int8_per_token_head": torch.int8, "fp8_per_token_head": torch.uint8}
"""Element type of the cache."""


def errors(kind: str) -> dict[str, float]:
    """Relative L2 errors of K and V."""
    from canary_vllm.compat import layers
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
    from vllm.v1.kv_cache_interface import get_kv_quant_mode

    from canary_adapters import probe_layout
    from canary_core.ops.torch.compare_kv import numbers

    impl: Any = TritonAttentionImpl.__new__(TritonAttentionImpl)
    impl.kv_cache_dtype, impl._kv_quant_mode, impl.attn_type = kind, get_kv_quant_mode(kind), "decoder"
    impl._is_per_token_head_quant, impl._k_scale_cache, impl._v_scale_cache = True, None, None
    impl.fp8_dtype = torch.float8_e4m3fn
    cache = torch.zeros(BLOCKS, HEADS, PAGE, 2 * (SIZE + 4), dtype=TYPES[kind])
    layer = SimpleNamespace(impl=impl, num_kv_heads=HEADS, head_size=SIZE, head_size_v=SIZE, kv_cache_dtype=kind)
    store = layers.Store.of(layer)
    pieces = probe_layout(partial(store, dtype=torch.float32), store.halves, cache, BLOCKS, PAGE)
    slots, given = torch.tensor([3, 17, 40, 41, 42, 79, 0]), torch.randn(2, 7, HEADS, SIZE)
    impl.do_kv_cache_update(layer, *given, cache, slots)
    found = {}
    for piece, wanted in zip(pieces, given.flatten(2), strict=True):
        source = piece.source(cache, PAGE, 0, layers.element_type(layer, cache))
        held, _ = numbers(replace(source, scaled=layers.scaled_type(layer, piece.chunk_bytes)), slots)
        found[source.name] = float((held - wanted).norm() / wanted.norm())
    return found


def main() -> None:
    """Prints the errors by type of the cache."""
    # vLLM for CPUs does without Triton, unless it finds a driver.
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    print(json.dumps({kind: errors(kind) for kind in TYPES}))


if __name__ == "__main__":
    main()
