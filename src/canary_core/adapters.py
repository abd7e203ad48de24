"""What a plugin author implements: `PoolAdapter` turns an engine's pool into regions, `BatchAdapter` a batch into a
`BatchView`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

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


class BatchAdapter(ABC, Generic[EngineBatch]):
    """Describes one forward of an engine. Called before every forward, so it must be cheap and must not sync."""

    @abstractmethod
    def view(self, batch: EngineBatch) -> BatchView | None:
        """What the forward reads and writes; None if it touches no KV (an idle or warm-up forward)."""
