"""Facts about KV brought by LMCache, from its settings, whichever engine it serves."""

import os
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SHARED = (
    "remote_url", "remote_storage_plugins", "storage_plugins", "external_backends", "local_disk", "enable_p2p",
    "enable_pd", "enable_xpyd", "gds_path", "weka_path", "maru_path", "enable_controller", "remote_config_url",
)  # fmt: skip
"""Settings that let others store where LMCache loads: servers, other engines, disks of earlier runs, and settings added
by a server. Old names are included."""
LOSSY = ("cachegen", "kivi")
"""Serializers with changed bytes on return."""


def lmcache_storage(extra: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether others may store where LMCache loads, and whether its bytes may differ from the stored ones. Its settings
    are in a file, in the environment, and in the engine's configuration, ``extra``, under names that begin with
    ``lmcache.``; the last one counts."""
    settings: dict[str, Any] = {}
    path = os.environ.get("LMCACHE_CONFIG_FILE")
    if path:
        settings |= pkgutil.resolve_name("yaml:safe_load")(Path(path).read_text()) or {}
    for variable, value in os.environ.items():
        if variable.startswith("LMCACHE_"):
            settings[variable.removeprefix("LMCACHE_").lower()] = value
    settings |= {k.removeprefix("lmcache.").lower(): v for k, v in extra.items() if k.startswith("lmcache.")}
    shared = any(_on(settings.get(name)) for name in SHARED)
    # A storage that is chosen in here only.
    shared = shared or "enable_nixl_storage" in str(settings.get("extra_config"))
    lossy = str(settings.get("remote_serde", "")).lower() in LOSSY or _on(settings.get("enable_blending"))
    return shared, lossy


def _on(value: Any) -> bool:
    return str(value).strip().lower() not in ("", "none", "null", "false", "0", "no", "off", "[]", "{}")
