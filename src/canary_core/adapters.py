"""What a plugin author implements: `PoolAdapter` turns an engine's pool into regions, `BatchAdapter` a batch into a
`BatchView`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from torch import Tensor

from canary_core.batch import BatchView
from canary_core.region import Region, Uncovered

EngineBatch = TypeVar("EngineBatch")


class PoolAdapter(ABC):
    """Describes one engine's KV pool. Called once, when the pool exists; tensors in, regions out."""

    @abstractmethod
    def regions(self) -> Sequence[Region]:
        """Every set of slots to guard. Raises `AttachError` where the pool isn't what the adapter expects."""

    def uncovered(self) -> Sequence[Uncovered]:
        """KV memory that the regions leave out, each with the reason."""
        return ()

    def pool_tensors(self) -> Mapping[str, Tensor]:
        """Every tensor in which the engine keeps KV, by the engine's own names; none if that can't be said. It must
        come from the engine's own objects (`tensors_of` finds their tensors), and not from what this adapter describes:
        the audit and the coverage judge the adapter by it. Called at any time, and cheap: a pool may move."""
        return {}


class BatchAdapter(ABC, Generic[EngineBatch]):
    """Describes one forward of an engine. Called before every forward, so it must be cheap and must not sync."""

    @abstractmethod
    def view(self, batch: EngineBatch) -> BatchView | None:
        """What the forward reads and writes; None if it touches no KV (an idle or warm-up forward)."""
