"""HiCache on a machine without CUDA: the copies between the pools, and the pinning of host memory, in torch.

Everything else is SGLang's own: cache, controller, host pools, their allocation, the scheduler.
"""

from typing import Any


def install() -> None:
    """Puts the stand-ins where SGLang's host pools look for its kernels. Call it before the engine is made."""
    from sglang.srt.mem_cache.pool_host import common, mha

    common._cuda_host_register = common._cuda_host_unregister = _nothing
    mha.transfer_kv_direct = _copy
    page = mha.MHATokenToKVPoolHost.get_dummy_flat_data_page

    def unpinned(pool: Any) -> Any:
        pool.pin_memory = False
        return page(pool)

    mha.MHATokenToKVPoolHost.get_dummy_flat_data_page = unpinned


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _copy(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    for source, destination in zip(src_layers, dst_layers, strict=True):
        destination[dst_indices] = source[src_indices]
