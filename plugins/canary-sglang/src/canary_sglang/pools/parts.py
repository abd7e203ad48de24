"""What a pool is put together from: adapters for a part of it, and its size."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from canary_adapters import require_disjoint
from canary_core import KVSource, PoolAdapter, Region, RegionKind, Uncovered

NULL_SLOT = 0
"""Where SGLang sends padded tokens; in a full → window map it means evicted."""


@dataclass(frozen=True, slots=True)
class Unguarded(PoolAdapter):
    """Memory that we see and don't guard."""

    name: str
    size_bytes: int
    reason: str

    def regions(self) -> Sequence[Region]:
        """None."""
        return ()

    def uncovered(self) -> Sequence[Uncovered]:
        """All of it."""
        return (Uncovered(self.name, self.size_bytes, self.reason),)


class CompressedPool(PoolAdapter):
    """One region whose slots hold ``ratio`` tokens each; page 0 is padding, whose first slot no token gets."""

    def __init__(self, name: str, ratio: int, sources: Sequence[KVSource]) -> None:
        slots = min(source.tensor.shape[0] * source.page_size for source in sources)
        self._region = Region(
            name, slots, tuple(sources), RegionKind.COMPRESSED, null_slot=NULL_SLOT, tokens_per_slot=ratio
        )
        require_disjoint([self._region])

    def regions(self) -> Sequence[Region]:
        """The one."""
        return (self._region,)


class WholePool(PoolAdapter):
    """Another adapter, held against the size that the engine itself gives for its pool."""

    def __init__(self, name: str, pool: Any, adapter: PoolAdapter) -> None:
        self._name = name
        self._adapter = adapter
        sizes = pool.get_kv_size_bytes()
        self._all_bytes = int(sum(sizes) if isinstance(sizes, tuple) else sizes)

    def regions(self) -> Sequence[Region]:
        """The adapter's."""
        return self._adapter.regions()

    def uncovered(self) -> Sequence[Uncovered]:
        """The adapter's, and bytes that are in none of its sources."""
        known = tuple(self._adapter.uncovered())
        guarded = sum(region.pool_bytes for region in self._adapter.regions())
        rest = self._all_bytes - guarded - sum(item.size_bytes for item in known)
        if rest <= 0:
            return known
        return (*known, Uncovered(f"{self._name}/rest", rest, "tensors of the pool that are not known to us"))


class SourcePool(PoolAdapter):
    """One region from ready sources of one index space, and what was left out."""

    def __init__(self, name: str, slots: int, sources: Iterable[KVSource], left_out: Sequence[Uncovered] = ()) -> None:
        self._region = Region(name, slots, tuple(sources), null_slot=NULL_SLOT)
        self._left_out = tuple(left_out)
        require_disjoint([self._region])

    def regions(self) -> Sequence[Region]:
        """The one."""
        return (self._region,)

    def uncovered(self) -> Sequence[Uncovered]:
        """What was left out."""
        return self._left_out


def tensor_bytes(thing: Any) -> int:
    """Bytes of all tensors of a pool, however they are kept; each storage once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(thing, 0)}.values())


def _tensors(thing: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, (list, tuple)):
        for item in thing:
            yield from _tensors(item, depth + 1)
    elif isinstance(thing, dict):
        yield from _tensors(list(thing.values()), depth)
    elif depth < 4 and (depth == 0 or _is_sglangs(thing)) and hasattr(thing, "__dict__"):
        yield from _tensors(list(vars(thing).values()), depth + 1)


def _is_sglangs(thing: Any) -> bool:
    """Also of a class derived from one of SGLang's: what lies elsewhere may hold half the process."""
    return any(base.__module__.startswith("sglang.") for base in type(thing).__mro__)
