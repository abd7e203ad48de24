"""`HostStore`: a KV connector of vLLM's own interface, outside of its tree, that never heard of Canary. It stores each
complete block of a prompt in host memory, and brings blocks back while the forward runs or in the steps before it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

Prefix = tuple[int, ...]
Fault = Callable[[Prefix, str, Tensor], Tensor | None]


@dataclass
class Store:
    """What both halves of the connector share, and what a test may change.

    blocks: by all tokens up to their end, the bytes of each layer; tokens of a LoRA adapter begin with its number below
    zero, unless ``adapters`` is False. wait_steps: how many steps a load takes, 0 for one
    that is done while the forward runs. whole: whether all tokens of a prompt are brought, the last one too. fault:
    gives other bytes of a block's layer, or None for none at all. failing: prefixes whose load ends with an error.
    loads: how many blocks were brought.
    """

    blocks: dict[Prefix, dict[str, Tensor]] = field(default_factory=dict)
    adapters: bool = True
    wait_steps: int = 0
    whole: bool = False
    fault: Fault | None = None
    failing: set[Prefix] = field(default_factory=set)
    loads: int = 0


STORE = Store()
"""The only one in this process."""


@dataclass
class _Job:
    request: str
    blocks: list[tuple[Prefix, int]]
    steps: int = 0


@dataclass
class _Metadata(KVConnectorMetadata):
    loads: list[_Job] = field(default_factory=list)
    stores: list[tuple[Prefix, int]] = field(default_factory=list)


class HostStore(KVConnectorBase_V1):
    """Named in vLLM's ``kv_connector``, with this module as ``kv_connector_module_path``."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._size = int(vllm_config.cache_config.block_size)
        self._loads: list[_Job] = []
        self._cached: dict[str, int] = {}
        self._requests: dict[str, tuple[list[int], list[int]]] = {}
        self._owners: dict[str, Prefix] = {}
        self._caches: dict[str, Tensor] = {}
        self._running: list[_Job] = []
        self._failed: set[int] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens of complete blocks that are stored, beyond those in vLLM's own cache."""
        tokens, owner = list(request.all_token_ids), _owner(request)
        most = len(tokens) if STORE.whole and STORE.wait_steps else len(tokens) - 1
        end = num_computed_tokens
        while end + self._size <= most and (*owner, *tokens[: end + self._size]) in STORE.blocks:
            end += self._size
        self._cached[request.request_id] = num_computed_tokens
        return end - num_computed_tokens, bool(STORE.wait_steps) and end > num_computed_tokens

    def reset_cache(self) -> bool:
        """Gives up all that is stored."""
        STORE.blocks.clear()
        return True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The blocks that are to be filled."""
        if num_external_tokens:
            tokens, held, owner = list(request.all_token_ids), blocks.get_block_ids()[0], _owner(request)
            first = self._cached[request.request_id]
            wanted = range(first // self._size, (first + num_external_tokens) // self._size)
            pairs = [((*owner, *tokens[: (i + 1) * self._size]), held[i]) for i in wanted]
            self._loads.append(_Job(request.request_id, pairs, STORE.wait_steps))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What to load, and the blocks of prompts that this step completes."""
        metadata = _Metadata(self._loads)
        self._loads = []
        for name in scheduler_output.finished_req_ids:
            self._requests.pop(name, None)
            self._owners.pop(name, None)
        ends: dict[str, int] = {}
        for new in scheduler_output.scheduled_new_reqs:
            self._requests[new.req_id] = (list(new.prompt_token_ids), list(new.block_ids[0]))
            self._owners[new.req_id] = _owner(new)
            ends[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            tokens, held = self._requests[name]
            if name in cached.resumed_req_ids:
                held.clear()
            held += blocks[0] if blocks else []
            ends[name] = computed
        for name, begin in ends.items():
            tokens, held = self._requests[name]
            end = min(begin + scheduler_output.num_scheduled_tokens[name], len(tokens))
            for i in range(begin // self._size, end // self._size):
                metadata.stores.append(((*self._owners[name], *tokens[: (i + 1) * self._size]), held[i]))
        return metadata

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """vLLM's own tensors by layer; a block is an index of their first dimension."""
        self._caches = dict(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begins to load."""
        for job in self._get_connector_metadata().loads:
            if job.steps:
                self._running.append(job)
            else:
                self._load(job)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All was loaded at the start."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """All is stored at the end."""

    def wait_for_save(self) -> None:
        """Stores what the step has completed."""
        for prefix, block in self._get_connector_metadata().stores:
            if prefix not in STORE.blocks:
                STORE.blocks[prefix] = {name: cache[block].clone() for name, cache in self._caches.items()}

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The requests whose blocks have all come."""
        done = set()
        for job in self._running:
            job.steps -= 1
            if not job.steps:
                self._load(job)
                done.add(job.request)
        self._running = [job for job in self._running if job.steps]
        return None, done or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that could not be loaded, since it was asked last."""
        failed, self._failed = self._failed, set()
        return failed

    def _load(self, job: _Job) -> None:
        for prefix, block in job.blocks:
            if prefix in STORE.failing:
                self._failed.add(block)
                continue
            STORE.loads += 1
            for name, data in STORE.blocks[prefix].items():
                brought = data if STORE.fault is None else STORE.fault(prefix, name, data.clone())
                if brought is not None:
                    self._caches[name][block] = brought


def _owner(request: Any) -> Prefix:
    adapter = request.lora_request if STORE.adapters else None
    return () if adapter is None else (-adapter.lora_int_id,)
