"""Data-parallel attention on a machine without CUDA: pinned memory, what gathers over NCCL, and the length of padded
rows, which torch_native does not say, are stood in for.

Everything else is SGLang's own: the scheduler of each rank, how they agree on each batch, padding, idle ranks, caches.
"""

from typing import Any


def install() -> None:
    """A plugin of SGLang's (group ``sglang.srt.plugins``), which each of its processes runs before anything else."""
    import torch
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    GroupCoordinator.all_gather_into_tensor = GroupCoordinator._all_gather_into_tensor
    GroupCoordinator.reduce_scatter_tensor = GroupCoordinator._reduce_scatter_tensor
    TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value = lambda backend: 1
    make = torch.tensor

    def tensor(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return make(*args, **options)

    torch.tensor = tensor
