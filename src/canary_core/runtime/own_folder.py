"""Folders that only the present user writes to."""

import os
import stat
from pathlib import Path


def is_own(folder: Path) -> bool:
    """Whether ``folder`` is a directory of the present user, and nobody else can write to it."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
