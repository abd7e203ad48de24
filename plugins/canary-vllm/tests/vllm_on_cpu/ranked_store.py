"""`RankedStore`: a `HostStore` for several ranks, each with its own shard; the scheduler's half is in a process of its
own."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from vllm_on_cpu.host_store import STORE, HostStore


class RankedStore(HostStore):
    """``kv_connector_extra_config`` has ``steps``, see `Store.wait_steps`. The scheduler's store has no bytes."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        STORE.wait_steps = int(vllm_config.kv_transfer_config.kv_connector_extra_config["steps"])

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What the workers will have stored at the end of the step."""
        metadata: Any = super().build_connector_meta(scheduler_output)
        for prefix, _ in metadata.stores:
            STORE.blocks.setdefault(prefix, {})
        return metadata
