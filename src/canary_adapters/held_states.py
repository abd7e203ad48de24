"""`HeldStates`: recurrent states of a request that is computed again, as they were when that began."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from canary_adapters.block_events import BlockGroup
from canary_adapters.parked_prefixes import GroupBlocks
from canary_core import Canary, Computed, KVSource

MOST_MEMORY = 0.5
"""Share of the device's free memory that a copy may take."""


@dataclass(frozen=True, slots=True)
class RecomputeBegun:
    """A message to the workers, before the forward of the same message: with it the internal request ``again`` begins,
    and the states in ``held``, by group, are of as many tokens as it has."""

    again: str
    held: GroupBlocks


class HeldStates:
    """Copies of states, kept in each worker until the same tokens are computed again: the request itself has gone on
    by then. Of one request at a time.

    groups: of states, in which a request has one block as long as it runs.
    """

    def __init__(self, canary: Canary, groups: Sequence[BlockGroup] = ()) -> None:
        self._canary = canary
        self._groups = groups
        self._again = ""
        self._copies: dict[str, tuple[KVSource, ...]] = {}

    def hold(self, begun: RecomputeBegun) -> None:
        """Copies the states, on the stream of the forwards, before the next one. Without memory for them nothing is
        kept, and they are not compared."""
        self._again, self._copies = begun.again, {}
        try:
            if self._fits():
                for group in self._groups:
                    (block,) = begun.held[group.number]
                    sources = self._canary.regions[group.region].sources
                    self._copies[group.region] = tuple(_copy(source, block) for source in sources if _whole(source))
        except torch.OutOfMemoryError:
            self._copies = {}

    def forget(self, again: str) -> None:
        """Gives up the copies, if any, for ``again``."""
        if again == self._again:
            self._again, self._copies = "", {}

    def take(self, again: str, own: GroupBlocks) -> Mapping[str, tuple[torch.Tensor, Computed]]:
        """By region, the slot of the states that ``again`` has computed, in its blocks ``own``, and the copies of those
        of the request. None where nothing was kept."""
        copies = self._copies if again == self._again and own else {}
        self.forget(again)
        first, device = torch.zeros(1, dtype=torch.int64, device=self._canary.device), self._canary.device
        return {
            group.region: (torch.tensor(own[group.number][:1], device=device), Computed(copies[group.region], first))
            for group in self._groups
            if group.region in copies
        }

    def _fits(self) -> bool:
        if self._canary.device.type != "cuda":
            return True
        sources = [source for group in self._groups for source in self._canary.regions[group.region].sources]
        return sum(source.slot_bytes for source in sources) <= MOST_MEMORY * torch.cuda.mem_get_info()[0]


def _whole(source: KVSource) -> bool:
    """Whether a slot is one piece of memory with all numbers of a state."""
    return source.chunks == source.page_size == 1 and source.tensor[0].nbytes == source.chunk_bytes


def _copy(source: KVSource, slot: int) -> KVSource:
    """The bytes of ``slot`` in their order, in the shape of a state."""
    tensor = source.tensor
    storage, first = tensor.untyped_storage(), source.address - tensor.untyped_storage().data_ptr()
    place = first + slot * source.slot_stride_bytes
    held = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    held = held.set_(storage, place, (source.chunk_bytes,), (1,)).clone()
    return replace(
        source, tensor=held.view(tensor.dtype).view(1, *tensor.shape[1:]), slot_stride_bytes=source.chunk_bytes,
        page_stride_bytes=source.chunk_bytes, offset_bytes=0,
    )  # fmt: skip
