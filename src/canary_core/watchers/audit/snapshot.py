"""`Snapshot`: the bytes of the engine's storages at one moment."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from canary_core.errors import CanaryError
from canary_core.watchers.audit.memory import EngineMemory

SHARE = 4
"""Largest part of the free memory for a snapshot: a fourth."""

PIECE_BYTES = 64 << 20
"""Bytes compared at once: temporary memory is a few times as much."""

SHOWN_BYTES = 1 << 18
"""Differing bytes per storage with a known place; all are counted."""


class NoRoomError(CanaryError):
    """A snapshot fits neither beside the pool nor in host memory."""


class Snapshot:
    """A copy of all storages of ``memory``: beside them where a fourth of the free memory suffices, else in host
    memory, if that suffices. The memory is allocated once; `take` fills it anew. Raises `NoRoomError`."""

    def __init__(self, memory: EngineMemory) -> None:
        self.memory = memory
        self.device = _place(memory)
        self.copies: list[Tensor] = [torch.empty_like(s.data, device=self.device) for s in memory.storages]

    @property
    def size_bytes(self) -> int:
        """Memory taken, in bytes."""
        return sum(c.numel() for c in self.copies)

    def take(self) -> None:
        """Copies the present storages, in the order of the current stream."""
        for copy, storage in zip(self.copies, self.memory.storages, strict=True):
            copy.copy_(storage.data)

    def differing(self, index: int) -> tuple[int, Tensor]:
        """How many bytes of storage ``index`` differ from the copy, and where the first of them are: int64 ``[n]``,
        offsets in the storage, in host memory. Waits for the device; works in pieces."""
        now, before = self.memory.storages[index].data, self.copies[index]
        total, places, room = 0, [torch.empty(0, dtype=torch.int64, device="cpu")], SHOWN_BYTES
        for first, end in pieces(now.numel(), PIECE_BYTES):
            old = before[first:end].to(now.device)
            if torch.equal(now[first:end], old):
                continue
            found = (now[first:end] != old).nonzero()[:, 0]
            total += len(found)
            shown = found[:room].cpu() + first
            room -= len(shown)
            places.append(shown)
        return total, torch.cat(places)


def pieces(length: int, size: int) -> Iterator[tuple[int, int]]:
    """``[0, length)`` in pieces of ``size``: first and end of each."""
    return ((first, min(first + size, length)) for first in range(0, length, size))


def _place(memory: EngineMemory) -> torch.device:
    need, devices = memory.size_bytes, {s.data.device for s in memory.storages}
    host = torch.device("cpu")
    told = []
    for device in (*sorted(devices - {host}, key=str)[: 1 if len(devices) == 1 else 0], host):
        free = _free_bytes(device)
        if free is None or need * SHARE <= free:
            return device
        told.append(f"{free >> 20} MiB on {device}")
    raise NoRoomError(
        f"a snapshot of the engine's KV takes {need >> 20} MiB, and only a fourth of free memory is used for it; there "
        f"are {' and '.join(told)}. Audit an engine with a smaller pool"
    )


def _free_bytes(device: torch.device) -> int | None:
    """Free memory on ``device``, None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = [n for n in (_available(), _left_in_group()) if n is not None]
    return min(limits, default=None)


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def _left_in_group() -> int | None:
    """Memory left by a container's limit, of control groups of version 2."""
    try:
        most, used = (Path("/sys/fs/cgroup", name).read_text().strip() for name in ("memory.max", "memory.current"))
        return max(int(most) - int(used), 0)
    except (OSError, ValueError):
        return None
