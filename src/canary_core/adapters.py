"""Interfaces for plugin authors: `PoolAdapter` turns an engine's pool into regions, `BatchAdapter` a batch into a
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
        """Every set of slots to guard. Raises `AttachError` if the pool isn't as expected."""

    def uncovered(self) -> Sequence[Uncovered]:
        """KV memory left out of the regions, each with the reason."""
        return ()

    def pool_tensors(self) -> Mapping[str, Tensor]:
        """Every tensor with KV of the engine, by the engine's own names; empty if unknown. The tensors must come from
        the engine's own objects (`tensors_of` finds them), not from the adapter's description: the audit and the
        coverage judge the adapter by them. Called at any time, and cheap: a pool may move."""
        return {}


class BatchAdapter(ABC, Generic[EngineBatch]):
    """Describes one forward of an engine. Called before every forward: must be cheap and must not sync."""

    @abstractmethod
    def view(self, batch: EngineBatch) -> BatchView | None:
        """Inputs and outputs of the forward; None for a forward without KV (idle or warm-up)."""
