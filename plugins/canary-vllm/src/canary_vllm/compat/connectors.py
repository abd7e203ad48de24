"""What the plugin asks of a KV connector, and what is known of those that vLLM brings along."""

import os
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from canary_core import Origin

LMCACHE_SHARED = (
    "remote_url", "remote_storage_plugins", "storage_plugins", "external_backends", "local_disk", "enable_p2p",
    "enable_pd", "enable_xpyd", "gds_path", "weka_path", "maru_path", "enable_controller", "remote_config_url",
)  # fmt: skip
"""Settings of LMCache that let others store where it loads from: servers, other engines, disks of earlier runs, and
settings that a server may add. Old names are among them."""
LOSSY = ("cachegen", "kivi")
"""Its serializers that do not give back what they were given."""


def origin(runner: Any, private: Sequence[str]) -> Origin | None:
    """The engine's connector, None for none. ``private``: names of those that only this engine stores with."""
    config = runner.vllm_config.kv_transfer_config
    if config is None or not config.kv_connector:
        return None
    name = str(config.kv_connector)
    extra: Mapping[str, Any] = config.kv_connector_extra_config or {}
    known = _KNOWN.get(name)
    shared, lossy = (True, False) if known is None else known(extra)
    return Origin(name, shared=shared and name not in private, lossy=lossy)


def instance() -> Any | None:
    """The connector of this worker, None where there is none (yet)."""
    transfer = pkgutil.resolve_name("vllm.distributed.kv_transfer")
    return transfer.get_kv_transfer_group() if transfer.has_kv_transfer_group() else None


def _offloading(extra: Mapping[str, Any]) -> tuple[bool, bool]:
    return extra.get("spec_name", "CPUOffloadingSpec") != "CPUOffloadingSpec", False


def _simple_offloading(extra: Mapping[str, Any]) -> tuple[bool, bool]:
    return extra.get("backend", "cpu") != "cpu", False


def _lmcache(extra: Mapping[str, Any]) -> tuple[bool, bool]:
    """Its settings are in a file, in the environment, and in vLLM's configuration; the last one counts."""
    settings: dict[str, Any] = {}
    path = os.environ.get("LMCACHE_CONFIG_FILE")
    if path:
        settings |= pkgutil.resolve_name("yaml:safe_load")(Path(path).read_text()) or {}
    for variable, value in os.environ.items():
        if variable.startswith("LMCACHE_"):
            settings[variable.removeprefix("LMCACHE_").lower()] = value
    settings |= {k.removeprefix("lmcache.").lower(): v for k, v in extra.items() if k.startswith("lmcache.")}
    shared = any(_on(settings.get(name)) for name in LMCACHE_SHARED)
    # A storage that is chosen in here only.
    shared = shared or "enable_nixl_storage" in str(settings.get("extra_config"))
    lossy = str(settings.get("remote_serde", "")).lower() in LOSSY or _on(settings.get("enable_blending"))
    return shared, lossy


def _on(value: Any) -> bool:
    return str(value).strip().lower() not in ("", "none", "null", "false", "0", "no", "off", "[]", "{}")


_KNOWN: Mapping[str, Callable[[Mapping[str, Any]], tuple[bool, bool]]] = {
    "OffloadingConnector": _offloading,
    "SimpleCPUOffloadConnector": _simple_offloading,
    "LMCacheConnectorV1": _lmcache,
}
"""Connector: whether others may store there, and whether what it brings is not bit by bit what it was given. Of all
others it is not known, so they count as shared."""
