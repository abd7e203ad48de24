"""Rotation of a directory's bundles, by age, number and size."""

import os
import shutil
import stat
import time
from calendar import timegm
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from canary_desk.incidents.bundle import FORMAT, PREFIX, content, parsed

DAY_S = 86400.0

MOST_MANIFEST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a directory: ``most`` bundles, ``most_bytes`` in all, ``days`` for each, 0 for ever. One bundle of each
    kind and the newest of all stay, whatever the limits."""

    most: int
    most_bytes: int
    days: float


@dataclass(frozen=True, slots=True)
class Kept:
    """A whole bundle of a directory. ``kind``: of its root; ``written``: seconds since the epoch."""

    path: Path
    kind: str
    written: float
    size_bytes: int


def bundles(directory: Path) -> Iterator[Kept]:
    """The bundles in ``directory``; anything else is passed over."""
    for path in directory.glob(f"{PREFIX}*"):
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            if not stat.S_ISDIR(path.lstat().st_mode):
                continue
            manifest = parsed(content(path / "manifest.json", MOST_MANIFEST_BYTES))
            if manifest["format"] == FORMAT:
                written = timegm(time.strptime(manifest["written"], "%Y-%m-%dT%H:%M:%SZ"))
                size = sum(file.lstat().st_size for file in path.iterdir())
                yield Kept(path, str(manifest.get("kind", "")), written, size)


def rotate(directory: Path, limits: Limits, aside: str) -> list[Path]:
    """Removes bundles of ``directory`` beyond ``limits``, and returns their paths: those that are too old, then the
    oldest of the most frequent kind. Each is first renamed with the prefix ``aside``, so a visible one is complete."""
    kept = sorted(bundles(directory), key=lambda bundle: (bundle.written, bundle.path.name))
    # The last of each kind, which the newest of all is, too.
    stays = {bundle.kind: bundle for bundle in kept}.values()
    loose = [bundle for bundle in kept if bundle not in stays]
    old = time.time() - limits.days * DAY_S if limits.days else 0.0
    gone = [bundle for bundle in loose if bundle.written < old]
    loose = loose[len(gone) :]
    number = len(kept) - len(gone)
    size_bytes = sum(bundle.size_bytes for bundle in kept) - sum(bundle.size_bytes for bundle in gone)
    kinds = Counter(bundle.kind for bundle in kept) - Counter(bundle.kind for bundle in gone)
    while loose and (number > limits.most or size_bytes > limits.most_bytes):
        one = max(loose, key=lambda bundle: kinds[bundle.kind])
        loose.remove(one)
        gone.append(one)
        number, size_bytes = number - 1, size_bytes - one.size_bytes
        kinds[one.kind] -= 1
    for bundle in gone:
        with suppress(OSError):
            # Another process may remove the same one.
            hidden = directory / f"{aside}{bundle.path.name}"
            os.rename(bundle.path, hidden)
            shutil.rmtree(hidden, ignore_errors=True)
    return [bundle.path for bundle in gone]
