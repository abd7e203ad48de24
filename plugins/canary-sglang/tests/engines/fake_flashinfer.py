"""FlashInfer's wrappers on a CPU: what they keep of the lists that SGLang plans them with, without their kernels."""

import types
from typing import Any

import torch
from torch import Tensor


class Wrapper:
    """Stands for the wrappers of paged KV. ``plan`` keeps lists as theirs do (0.6.15.post1: ``decode.py``
    from line 1410 on, ``prefill.py`` from line 2337 on): for a CUDA graph copied to the buffers that it was made with,
    else as they were given."""

    def __init__(self, *_: Any, use_cuda_graph: bool = False, **buffers: Any) -> None:
        self.is_cuda_graph_enabled = use_cuda_graph
        made = {name.removesuffix("fer"): buffer for name, buffer in buffers.items()}
        self._paged_kv_indptr_buf = made.get("paged_kv_indptr_buf")
        self._paged_kv_indices_buf = made.get("paged_kv_indices_buf")

    def plan(self, indptr: Tensor, indices: Tensor) -> None:
        if not self.is_cuda_graph_enabled:
            self._paged_kv_indptr_buf, self._paged_kv_indices_buf = indptr, indices
            return
        assert self._paged_kv_indptr_buf is not None
        assert self._paged_kv_indices_buf is not None
        self._paged_kv_indptr_buf.copy_(indptr)
        self._paged_kv_indices_buf[: len(indices)].copy_(indices)


class Decode(Wrapper):
    """`BatchDecodeWithPagedKVCacheWrapper`."""

    def begin_forward(self, indptr: Tensor, indices: Tensor, *_: Any, **__: Any) -> None:
        """``plan`` by its old name."""
        self.plan(indptr, indices)


class Prefill(Wrapper):
    """`BatchPrefillWithPagedKVCacheWrapper`."""

    def begin_forward(self, queries: Tensor, indptr: Tensor, indices: Tensor, *_: Any, **__: Any) -> None:
        """``plan`` by its old name."""
        self.plan(indptr, indices)


class Ragged:
    """`BatchPrefillWithRaggedKVCacheWrapper`, which reads no paged KV."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def begin_forward(self, *_: Any, **__: Any) -> None:
        """Nothing to keep."""


def fast_decode_plan(wrapper: Wrapper, indptr: Tensor, indices: Tensor, *_: Any, **__: Any) -> None:
    """Of graphs, whose buffers SGLang has filled itself (``decode.py`` from line 3617 on): they are left alone."""
    assert wrapper.is_cuda_graph_enabled


def backend(runner: Any) -> Any:
    """SGLang's own `FlashInferAttnBackend` on a CPU, with these wrappers."""
    from sglang.srt.layers.attention import flashinfer_backend

    there = vars(flashinfer_backend)
    there.update(
        BatchDecodeWithPagedKVCacheWrapper=Decode,
        BatchPrefillWithPagedKVCacheWrapper=Prefill,
        BatchPrefillWithRaggedKVCacheWrapper=Ragged,
        fast_decode_plan=fast_decode_plan,
    )

    class OnCPU(types.ModuleType):
        """torch, with the CPU for every device that its functions are asked for."""

        def __getattr__(self, name: str) -> Any:
            found = getattr(torch, name)
            if name not in ("empty", "zeros"):
                return found
            return lambda *args, **kwargs: found(*args, **{**kwargs, "device": "cpu"})

    there["torch"] = OnCPU("torch")
    flashinfer_backend.FlashInferAttnBackend._full_cg_prefill_workspace_bytes = staticmethod(lambda *_, **__: 1)
    return flashinfer_backend.FlashInferAttnBackend(runner)
