"""Adapters for more than one kind of pool, and the size of a pool."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from canary_core import AttachError, PoolAdapter, Region, Uncovered

NULL_SLOT = 0
"""SGLang writes padded tokens there. In a map from full to window slots: the window slot was evicted."""


@dataclass(frozen=True, slots=True)
class Unguarded(PoolAdapter):
    """Found but unguarded memory. ``held``: its pool or tensors, if there are such."""

    name: str
    size_bytes: int
    reason: str
    held: Any = None

    def regions(self) -> Sequence[Region]:
        """None."""
        return ()

    def uncovered(self) -> Sequence[Uncovered]:
        """All of the memory; by storages where known."""
        if self.held is None:
            return (Uncovered(self.name, self.size_bytes, self.reason),)
        return left_out(self.name, self.held, self.reason)


def or_unguarded(name: str, pool: Any, build: Callable[[], PoolAdapter], parts: Sequence[Any] = ()) -> PoolAdapter:
    """The adapter made by ``build`` for ``pool``. If ``build`` raises `AttachError`, an `Unguarded` named ``name``,
    with the bytes of ``parts`` (none given: of the pool) and the error as its reason."""
    try:
        return build()
    except AttachError as error:
        held = tuple(parts or (pool,))
        size_bytes = sum(tensor_bytes(part) for part in held)
        return Unguarded(name, size_bytes, f"{type(pool).__name__} is not as expected: {error}", held)


def model_layers(pool: Any, layers: Sequence[int] | None) -> Sequence[int]:
    """Numbers of the pool's layers in the model: ``layers``, or, without any, the pool's own."""
    first = int(pool.start_layer)
    return layers or range(first, first + pool.layer_num)


class WholePool(PoolAdapter):
    """The regions of another adapter. Bytes counted by SGLang to the pool and outside of all regions are left out."""

    def __init__(self, name: str, pool: Any, adapter: PoolAdapter) -> None:
        self._name = name
        self._adapter = adapter
        sizes = pool.get_kv_size_bytes()
        self._all_bytes = int(sum(sizes) if isinstance(sizes, tuple) else sizes)

    def regions(self) -> Sequence[Region]:
        """The adapter's."""
        return self._adapter.regions()

    def uncovered(self) -> Sequence[Uncovered]:
        """Memory left out by the adapter, and the pool's bytes outside of its sources."""
        known = tuple(self._adapter.uncovered())
        guarded = sum(region.pool_bytes for region in self._adapter.regions())
        rest = self._all_bytes - guarded - sum(item.size_bytes for item in known)
        if rest <= 0:
            return known
        return (*known, Uncovered(f"{self._name}/rest", rest, "tensors of the pool that are not known to us"))


def tensor_bytes(thing: Any) -> int:
    """Bytes of all tensors in a pool, a list, or a tensor itself. Each storage counts once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(thing, 0)}.values())


def left_out(name: str, thing: Any, reason: str) -> tuple[Uncovered, ...]:
    """The memory of all tensors in a pool, a list, or a tensor itself: one item for each storage."""
    storages = {t.untyped_storage().data_ptr(): t for t in _tensors(thing, 0) if t.untyped_storage().nbytes()}
    wholes = [storage_bytes(t) for t in storages.values()]
    return tuple(Uncovered(name, whole.nbytes, reason, whole) for whole in wholes)


def storage_bytes(tensor: Tensor) -> Tensor:
    """All bytes of the storage of ``tensor``, in place: uint8 ``[n]``."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


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
    """Whether the object's class is one of SGLang's or derived from one. Other objects may refer to half the
    process."""
    return any(base.__module__.startswith("sglang.") for base in type(thing).__mro__)
