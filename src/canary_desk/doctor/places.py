"""Whether an engine may write and listen as its settings say, and whether its own plugin filter admits Canary."""

import errno
import importlib.util
import shutil
import socket
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Literal

from canary_core.config import CanaryConfig
from canary_core.config.key_file import open_to_others, read_key
from canary_core.config.shown import variable_of_others
from canary_core.errors import CanaryError
from canary_desk.incidents.bundle import PREFIX

CheckVerdict = Literal["ok", "note", "bad"]

LEAST_FREE_BYTES = 100 << 20
"""Least free bytes of a disk; with fewer, it may be full before the first incident's bundle is written."""

FILTERS = {"sglang": ("SGLANG_PLUGINS", "sglang.srt.plugins"), "vllm": ("VLLM_PLUGINS", "vllm.general_plugins")}
"""By plugin: the variable with the names of the engine's plugins, and the group of entry points to choose from."""


def incident_dir(config: CanaryConfig) -> tuple[CheckVerdict, str] | None:
    """Whether bundles can be written, and a sentence; None where none are asked for. Leaves nothing behind."""
    if not config.incident_dir:
        return None
    folder = Path(config.incident_dir)
    wrong = _not_writable(folder)
    if wrong is not None:
        return "bad", f"no bundle can be written into {folder}: {wrong}"
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < LEAST_FREE_BYTES:
        return "bad", f"{folder} has {free >> 20} MiB left; a bundle may take some"
    bundles = sum(path.name.startswith(PREFIX) for path in folder.iterdir()) if folder.is_dir() else 0
    return "ok", f"{folder} can be written, {bundles} bundles"


def key_file(config: CanaryConfig) -> tuple[CheckVerdict, str] | None:
    """Whether the secret of ``CANARY_KEY_FILE`` can be used; None without one."""
    if not config.key_file:
        return None
    try:
        read_key("CANARY_KEY_FILE", config.key_file)
    except CanaryError as error:
        return "bad", str(error)
    reason = open_to_others(config.key_file)
    return ("note", reason) if reason else ("ok", f"{config.key_file}: fingerprints are exchanged under its secret")


def metrics(config: CanaryConfig, shared: str | None) -> tuple[CheckVerdict, str] | None:
    """Whether the metrics can be had where the settings say, and a sentence; None where that is the engine's affair.
    ``shared``: the folder of ``PROMETHEUS_MULTIPROC_DIR``."""
    if config.metrics == "off":
        return None if config.metrics_listen is None else ("bad", "off by CANARY_METRICS, so nothing listens")
    if config.metrics_listen is None:
        if shared is None:
            return None
        wrong = _not_writable(Path(shared)) if Path(shared).is_dir() else "it is not there"
        if wrong is not None:
            return "bad", f"PROMETHEUS_MULTIPROC_DIR is {shared}, and can't be written: {wrong}"
        return "ok", f"in the files of {shared}"
    if importlib.util.find_spec("prometheus_client") is None:
        return "bad", "CANARY_METRICS_LISTEN needs prometheus_client; pip install prometheus_client"
    address, port = config.metrics_listen.address, config.metrics_listen.port
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as trial:
            # As the server does it: a port that was left a moment ago is free.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((address, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return (
                "note",
                f"port {port} of {address} is taken, so the next free one will be; a metrics event tells which",
            )
        return "bad", f"port {port} of {address} can't be had ({error})"
    return "ok", f"port {port} of {address} is free; further ranks and replicas take those after it"


def filtered_out(plugin: str, distribution: str | None) -> str | None:
    """Why the engine of ``plugin`` would not load it, by the engine's own variable; None if it would."""
    variable, group = FILTERS.get(plugin, ("", ""))
    value = variable_of_others(variable)
    # SGLang takes an empty list for none, vLLM for one that allows nothing, and takes names with their blanks.
    if value is None or (plugin == "sglang" and not value):
        return None
    allowed = [name.strip() if plugin == "sglang" else name for name in value.split(",")]
    points = metadata.entry_points(group=group)
    name = next((p.name for p in points if p.dist is not None and p.dist.name == distribution), "canary")
    if name in allowed:
        return None
    others = [one.strip() for one in allowed if one.strip() not in ("", name)]
    return f"{variable}={value!r} leaves it out; set {variable}={','.join([*others, name])}"


def _not_writable(folder: Path) -> str | None:
    """Why nothing can be written into ``folder``, or its future place; None if it can."""
    there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return error.strerror or str(error)
