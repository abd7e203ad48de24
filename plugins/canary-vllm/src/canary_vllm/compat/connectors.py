"""Questions to a KV connector, and facts about vLLM's own."""

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from canary_adapters import lmcache_storage
from canary_core import Origin


def origin(runner: Any, private: Sequence[str]) -> Origin | None:
    """The engine's connector, None for none. ``private``: names of connectors without other engines' stores."""
    config = runner.vllm_config.kv_transfer_config
    if config is None or not config.kv_connector:
        return None
    name = str(config.kv_connector)
    extra: Mapping[str, Any] = config.kv_connector_extra_config or {}
    known = _KNOWN.get(name)
    shared, lossy = (True, False) if known is None else known(extra)
    return Origin(name, shared=shared and name not in private, lossy=lossy)


def instance() -> Any | None:
    """The worker's connector, None without one (yet)."""
    transfer = pkgutil.resolve_name("vllm.distributed.kv_transfer")
    return transfer.get_kv_transfer_group() if transfer.has_kv_transfer_group() else None


def ends(connector: Any) -> str:
    """Name of the connector's function that names requests whose load has ended; older releases have the second."""
    return "get_transfer_results" if hasattr(connector, "get_transfer_results") else "get_finished"


def ended(results: Any, told: Callable[..., set[str]]) -> Any:
    """``results`` of `ends`, with the names that ``told`` makes of those in there, and of those that failed."""
    if isinstance(results, tuple):
        return results[0], told(results[1])
    results.finished_recving = told(results.finished_recving, results.failed_recving)
    return results


_KNOWN: Mapping[str, Callable[[Mapping[str, Any]], tuple[bool, bool]]] = {
    "OffloadingConnector": lambda extra: (extra.get("spec_name", "CPUOffloadingSpec") != "CPUOffloadingSpec", False),
    "SimpleCPUOffloadConnector": lambda extra: (extra.get("backend", "cpu") != "cpu", False),
    "LMCacheConnectorV1": lmcache_storage,
}
"""Connector: whether others may store there, and whether bytes may come back changed. Others are unknown, and count as
shared."""
