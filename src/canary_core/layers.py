"""Rotation of layers (``CANARY_LAYERS``): one process guards the bytes of some layers, a fleet those of all."""

import socket
import time
import zlib
from collections.abc import Collection, Iterable, Sequence

from canary_core.config import CanaryConfig
from canary_core.region import KVSource, Region, Uncovered

_HOURS = int(time.time()) // 3600
"""Hours of the epoch when this process began: all pools of a process have the same turn."""


def turn_of(config: CanaryConfig) -> int:
    """Index of the first guarded layer, below `LayerShare.parts`: as set, or by host, replica, rank and the hour of the
    start. Replicas of one host that start within one hour have turns one after the other."""
    share = config.layers
    if share.turn is not None:
        return share.turn
    # Days and weeks beside the hours: an engine that is restarted every day, or every week, has another turn each time.
    started = _HOURS + _HOURS // 24 + _HOURS // (24 * 7)
    return (zlib.crc32(socket.gethostname().encode()) + config.replica + config.rank + started) % share.parts


def guarded_layers(layers: Iterable[int], config: CanaryConfig) -> Collection[int]:
    """The layers of a region, whatever their numbers, whose bytes are fingerprinted."""
    return frozenset(sorted(set(layers))[turn_of(config) :: config.layers.parts])


def of_guarded_layers(sources: Sequence[KVSource], config: CanaryConfig) -> tuple[KVSource, ...]:
    """The sources of `guarded_layers`, in their order."""
    if config.layers.parts == 1:
        return tuple(sources)
    chosen = guarded_layers((s.layer for s in sources), config)
    return tuple(s for s in sources if s.layer in chosen)


def resting(regions: Sequence[Region], config: CanaryConfig) -> list[Uncovered]:
    """The layers of ``regions`` whose bytes are left to other processes: doubts of the coverage without a size, since
    their slots are checked."""
    if config.layers.parts == 1 or config.bytes == "off":
        return []
    told = []
    for region in regions:
        layers = {s.layer for s in region.sources}
        chosen = sorted(guarded_layers(layers, config))
        if len(chosen) < len(layers):
            here = f"those of layers {', '.join(map(str, chosen))} are" if chosen else "none of them is"
            reason = f"CANARY_LAYERS={config.layers}: {here} guarded here, the rest in other processes"
            told.append(Uncovered(f"bytes of {len(layers)} layers of {region.name}", 0, reason))
    return told
