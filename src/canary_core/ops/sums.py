"""`Sums`: sources that share fingerprints, where one for each would take more memory than ``CANARY_MEMORY`` allows.

With ``raw = sum(word * key)`` of a slot in each source of a group, the slot has two numbers for all of them (modulo
2**64):

    salt + sum(raw of each source)        other salt + sum(raw of each source * weight of the source)

A weight is odd, and no two are the same modulo 2**33. If one source has changed by ``d``, the first number differs by
``d`` and the second by ``d * weight``: that names the source, and ``d`` is all that is needed to find a flipped word in
it (`hashing.only_word`). Of several changed sources only the group is known. Any two flipped bits are seen, as with one
fingerprint a source: in the same word of two sources, where the first number may stay, the second does not.

A group is of one half. Only where the largest such groups take more than allowed, all halves of some layers share one.
"""

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from canary_core.config import CanaryConfig
from canary_core.ops import hashing
from canary_core.ops.fingerprint_keys import FingerprintKeys
from canary_core.region import KVSource, Region

FREE_BYTES = 64 << 20
"""Fingerprints of a region that are one for each source, whatever their share of the pool."""

MOST_PARTS, MOST_LAYERS = 32, 32
"""Layers of a group of one half, and of a group of all halves."""

MOST_WORDS = 1024
"""Words of a slot in one source that shares fingerprints: the fingerprint of a longer one is small beside it."""

PER_GROUP = 2
"""Numbers of a group."""


class Sums(NamedTuple):
    """groups: indices of each group's sources; none, and false, where each source has its own fingerprint. weights: odd
    int64 ``[sources]``, on the host; and ``device_weights``, ``members`` (each group's indices) on the device, so that
    nobody waits for it."""

    groups: tuple[tuple[int, ...], ...]
    weights: Tensor
    device_weights: Tensor
    members: tuple[Tensor, ...]

    def __bool__(self) -> bool:
        return bool(self.groups)

    @classmethod
    def of(cls, sources: Sequence[KVSource], region: Region, config: CanaryConfig, others: float) -> "Sums":
        """The sums for ``sources`` of ``region``, which has ``others`` bytes of Canary's for a slot beside them. Groups
        are as small as the memory allows."""
        nothing = torch.zeros(0, dtype=torch.int64, device="cpu")
        own, none = 8 * len(sources), cls((), nothing, nothing, ())
        if config.memory.share is None or own * region.slots <= FREE_BYTES:
            return none
        room = config.memory.share * sum(source.slot_bytes for source in region.sources) - others
        if own <= room or max(source.slot_words for source in sources) > MOST_WORDS:
            return none
        groups = _grouped(sources, room)
        weights = weights_of(FingerprintKeys.of(config), len(sources))
        members = tuple(torch.tensor(group, dtype=torch.int64, device=region.device) for group in groups)
        return cls(groups, weights, weights.to(region.device), members)

    @property
    def width(self) -> int:
        """Numbers of a group."""
        return PER_GROUP

    @property
    def columns(self) -> int:
        """Numbers of a slot."""
        return PER_GROUP * len(self.groups)

    def changed(self, stored: Tensor, found: Tensor) -> list[int]:
        """The smallest set of sources that explains the differences between two rows of numbers, int64 ``[columns]`` on
        the host; in order."""
        out: list[int] = []
        for group, (by, weighted) in zip(self.groups, (found - stored).view(-1, PER_GROUP, 1), strict=True):
            alone, several = explained(by, weighted, self.weights[list(group)])
            out += (
                group if bool(several) else [i for i, named in zip(group, alone[:, 0].tolist(), strict=True) if named]
            )
        return sorted(out)


def weights_of(keys: FingerprintKeys, sources: int) -> Tensor:
    """By the end of the words whose keys are sure, so that no source's weight is the key of one of its words; int64
    ``[sources]`` on the host."""
    return keys.words(hashing.SURE_WORDS)[-sources:]


def explained(by: Tensor, weighted: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Which source of a group with ``weights``, int64 ``[parts]``, explains alone that its two numbers differ, ``by``
    and ``weighted``, int64 ``[n]``: bool ``[parts, n]``; and where several must have changed, bool ``[n]``."""
    alone = (by != 0) & (by * weights[:, None] == weighted)
    return alone, ((by != 0) | (weighted != 0)) & ~alone.any(0)


def _grouped(sources: Sequence[KVSource], room: float) -> tuple[tuple[int, ...], ...]:
    """Groups of indices, in order, whose numbers take at most ``room`` bytes of a slot, or as little as they can."""
    groups: list[tuple[int, ...]] = []
    kinds = (_alike(sources, of_one_half=True), MOST_PARTS), (_alike(sources, of_one_half=False), MOST_LAYERS)
    for alike, layers in ((alike, layers) for alike, most in kinds for layers in range(PER_GROUP + 1, most + 1)):
        groups = [group for by_layer in alike for group in _parted(by_layer, layers)]
        if 8 * PER_GROUP * len(groups) <= room:
            break
    return tuple(sorted(groups))


def _kind(source: KVSource) -> tuple[object, ...]:
    """Sources of one group agree in this: one kernel reads them, and one rule judges them."""
    shape = source.page_size, source.chunks, source.chunk_bytes, source.alignment, source.present_slots
    return source.part, source.role, source.dtype, *shape


def _alike(sources: Sequence[KVSource], *, of_one_half: bool) -> list[list[list[int]]]:
    """Of each kind the indices of its sources, by layer."""
    found: dict[tuple[object, ...], dict[int, list[int]]] = {}
    for index, source in enumerate(sources):
        kind = source.half if of_one_half else "", *_kind(source)
        found.setdefault(kind, {}).setdefault(source.layer, []).append(index)
    return [list(by_layer.values()) for by_layer in found.values()]


def _parted(by_layer: list[list[int]], layers: int) -> list[tuple[int, ...]]:
    """The indices in as few groups of at most so many ``layers`` as possible, all of nearly the same size."""
    count = -(-len(by_layer) // layers)
    ends = [i * len(by_layer) // count for i in range(count + 1)]
    return [tuple(sorted(chain(*by_layer[first:end]))) for first, end in pairwise(ends)]
