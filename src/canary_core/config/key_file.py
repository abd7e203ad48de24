"""A secret in a file, named by a setting."""

import os
import stat
from pathlib import Path

from canary_core.errors import ConfigError

LEAST_KEY_BYTES, MOST_KEY_BYTES = 16, 4096
"""Bounds of a key's length."""


def read_key(setting: str, path: str) -> bytes:
    """The key in the file ``path``, without white space around. Raises `ConfigError`, which names the ``setting``,
    where it can't be read or is too short."""
    try:
        with Path(path).open("rb") as file:
            key = file.read(MOST_KEY_BYTES).strip()
    except OSError as error:
        raise ConfigError(f"{setting}: {path} can't be read: {error}") from error
    if len(key) < LEAST_KEY_BYTES:
        raise ConfigError(f"{setting}: {path} has {len(key)} bytes, {LEAST_KEY_BYTES} at least")
    return key


def open_to_others(path: str) -> str:
    """A sentence where everybody on the machine may read the file ``path``; empty where not."""
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if not mode & stat.S_IROTH:
        return ""
    return f"everybody on the machine may read {path} (mode {mode:o}); chmod 600 it, or defaultMode: 0400 of a volume"
