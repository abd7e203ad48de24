"""`GroupedStore`: a `HostStore` for engines whose groups of layers have blocks of their own."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, SupportsHMA

from vllm_on_cpu.host_store import STORE, HostStore


class GroupedStore(HostStore, SupportsHMA):
    """A block of a prefix is a tuple, with the number that each group has for it; 0 where a window has passed it."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = enumerate(kv_cache_config.kv_cache_groups)
        self._group = {name: number for number, group in groups for name in group.layer_names}

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """The blocks may be freed."""
        return False, None

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The blocks that are to be filled, of each group."""
        held = blocks.get_block_ids()
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            job = self._loads[-1]
            job.blocks = [(prefix, self._of(held, len(prefix))) for prefix, _ in job.blocks]  # type: ignore[misc]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See `HostStore`; the blocks are looked up when the step has ended, by `_held`."""
        self._follow(scheduler_output)
        metadata: Any = super().build_connector_meta(scheduler_output)
        stores: dict[tuple[int, ...], tuple[int, ...]] = {}
        for name, (tokens, _) in self._requests.items():
            for prefix, _ in metadata.stores:
                if tuple(tokens[: len(prefix)]) == prefix:
                    stores[prefix] = self._of(self._held[name], len(prefix))
        metadata.stores = [*stores.items()]
        return metadata

    def wait_for_save(self) -> None:
        """Stores what the step has completed, of each group that still has it."""
        for prefix, numbers in self._get_connector_metadata().stores:
            if prefix not in STORE.blocks:
                found = {name: numbers[number] for name, number in self._group.items()}
                STORE.blocks[prefix] = {name: self._caches[name][b].clone() for name, b in found.items() if b}

    def _of(self, held: Any, length: int) -> tuple[int, ...]:
        return tuple(group[length // self._size - 1] for group in held)

    def _follow(self, output: Any) -> None:
        self._held = {n: h for n, h in getattr(self, "_held", {}).items() if n not in output.finished_req_ids}
        for new in output.scheduled_new_reqs:
            self._held[new.req_id] = [list(group) for group in new.block_ids]
        cached = output.scheduled_cached_reqs
        for name, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self._held[name] = [[] for _ in self._held[name]]
            for group, blocks in zip(self._held[name], more or (), strict=False):
                group += blocks

    def _load(self, job: Any) -> None:
        for prefix, numbers in job.blocks:
            STORE.loads += 1
            for name, data in STORE.blocks[prefix].items():
                brought = data if STORE.fault is None else STORE.fault(prefix, name, data.clone())
                if brought is not None and numbers[self._group[name]]:
                    self._caches[name][numbers[self._group[name]]] = brought
