"""`Place`: host, process, GPU, rank and model of a Canary."""

import os
import socket
from dataclasses import dataclass
from functools import lru_cache

import torch

from canary_core.config import CanaryConfig


@dataclass(frozen=True, slots=True)
class Place:
    """The machine ``host`` (in a container its own name), the process ``pid``; ``gpu``: the driver's UUID, ``pci``: the
    address on the bus, both empty on a CPU. ``replica``: index of the data-parallel engine, ``rank``: index of the
    process within the engine. ``model``: a draft model's own name, else the engine's served name, empty where
    unknown. ``self_test``: faults of Canary's own are injected, so an incident is none of the engine's."""

    host: str
    pid: int
    gpu: str
    pci: str
    replica: int
    rank: int
    model: str
    self_test: bool = False

    @classmethod
    def of(cls, config: CanaryConfig, device: torch.device) -> "Place":
        """The place of a pool on ``device``, whose context exists."""
        gpu, pci = _gpu(device)
        return cls(
            socket.gethostname(),
            os.getpid(),
            gpu,
            pci,
            config.replica,
            config.rank,
            config.model or config.served_model,
            bool(config.faults.strip()),
        )

    def fields(self) -> dict[str, object]:
        """The known parts, as fields of each event."""
        named = {"host": self.host, "gpu": self.gpu, "model": self.model}
        test = {"self_test": True} if self.self_test else {}
        return {**{k: v for k, v in named.items() if v}, **test, "replica": self.replica, "rank": self.rank}

    @property
    def labels(self) -> tuple[str, str, str]:
        """Replica, rank and model, as labels of metrics."""
        return str(self.replica), str(self.rank), self.model


@lru_cache
def _gpu(device: torch.device) -> tuple[str, str]:
    """UUID and bus address of a GPU, each empty where torch does not say."""
    if device.type != "cuda":
        return "", ""
    found = torch.cuda.get_device_properties(device)
    uuid = str(getattr(found, "uuid", "") or "")
    parts = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    numbers = [part for part in parts if isinstance(part, int)]
    pci = "{:08x}:{:02x}:{:02x}.0".format(*numbers) if len(numbers) == len(parts) else ""
    return (uuid if not uuid or uuid.startswith("GPU-") else f"GPU-{uuid}"), pci
