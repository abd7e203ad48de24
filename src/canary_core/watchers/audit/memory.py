"""The engine's KV memory by the engine's own names: `EngineMemory`, and `tensors_of`, the search for its tensors."""

import sys
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MemberDescriptorType
from typing import Any

import torch
from torch import Tensor

from canary_core.errors import AttachError
from canary_core.region import KVSource

_FOREIGN = {"torch", "numpy", *sys.stdlib_module_names}

PoolTensors = Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]]
"""Every tensor with KV of an engine, by the engine's own names; or a function that returns them."""


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """One allocation of the engine. ``data``: all bytes, uint8 ``[n]``, in place. ``tensors``: the engine's tensors
    within, by name."""

    data: Tensor
    tensors: tuple[tuple[str, Tensor], ...]

    @property
    def start(self) -> int:
        """Address of the first byte."""
        return self.data.data_ptr()

    @property
    def end(self) -> int:
        """Address after the last byte."""
        return self.start + self.data.numel()

    @property
    def names(self) -> str:
        """The tensors' names, for a sentence."""
        shown = ", ".join(f"'{name}'" for name, _ in self.tensors[:3])
        return shown + (f" and {len(self.tensors) - 3} more" if len(self.tensors) > 3 else "")

    def tensor_at(self, offset: int) -> tuple[str, Tensor] | None:
        """The smallest tensor over ``offset`` (bytes from the storage's start), None if there is none."""
        holding = [
            (name, tensor)
            for name, tensor in self.tensors
            if 0 <= offset - (tensor.data_ptr() - self.start) < reach_bytes(tensor)
        ]
        return min(holding, key=lambda item: item[1].nbytes, default=None)


class EngineMemory:
    """The storages of the engine's KV tensors, each once, in the order of their names.

    Raises `AttachError` for anything but a tensor with memory. Tensors without elements are left out.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        found: dict[tuple[torch.device, int, int], list[tuple[str, Tensor]]] = {}
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.device.type == "meta":
                raise AttachError(
                    f"pool_tensors: {name!r} must be a dense tensor with memory of its own, got {_what(tensor)}; leave "
                    "it out, or name the tensors that it holds"
                )
            storage = tensor.untyped_storage()
            if tensor.numel() and storage.nbytes():
                key = (tensor.device, storage.data_ptr(), storage.nbytes())
                found.setdefault(key, []).append((name, tensor))
        self.storages: tuple[Storage, ...] = tuple(
            Storage(storage_bytes(items[0][1]), tuple(items)) for items in _outermost(found)
        )
        self._places = sorted((str(s.data.device), s.start, s.end, i) for i, s in enumerate(self.storages))

    @property
    def size_bytes(self) -> int:
        """Of all storages."""
        return sum(s.data.numel() for s in self.storages)

    @property
    def places(self) -> frozenset[tuple[int, int]]:
        """Where the storages are: two memories with the same places are the same memory."""
        return frozenset((start, end) for _, start, end, _ in self._places)

    def holding(self, source: KVSource, slots: int) -> int | None:
        """Index of the storage with all of ``source``'s ``slots`` slots, None if the engine has no such memory."""
        device, start = str(source.tensor.device), source.tensor.data_ptr()
        at = bisect(self._places, (device, source.address, sys.maxsize)) - 1
        if at < 0:
            return None
        where, first, end, index = self._places[at]
        inside = where == device and first <= source.address and start + source.reach_bytes(slots) <= end
        return index if inside else None


def storage_bytes(tensor: Tensor) -> Tensor:
    """All bytes of the storage of ``tensor``: uint8 ``[n]``, in place."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def reach_bytes(tensor: Tensor) -> int:
    """Bytes from the first element of ``tensor`` to the end of the last one."""
    if not tensor.numel():
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


def tensors_of(thing: object, leave_out: Callable[[str, object], bool] | None = None) -> dict[str, Tensor]:
    """The torch tensors held by ``thing`` (an engine's object, of any class), by place: attributes, ``__slots__``
    included, items of lists and tuples, values of dicts, and the same of objects in them, as ``k_buffer[3]`` or
    ``full.k["x"]``. A tensor in several places is named once, by the shortest path.

    The search enters plain containers, and objects of the packages that define the class of ``thing`` (for a container,
    of its items) or one of its bases; so it does not wander into torch or the standard library. ``leave_out(name,
    found)``: whether to leave an object out, asked before taking or entering it. Calls nothing of the engine: no
    property, no method.
    """
    roots = [value for _, value in _inner("", thing)] if isinstance(thing, (list, tuple, set, Mapping)) else [thing]
    packages = {cls.__module__.partition(".")[0] for root in roots for cls in type(root).__mro__} - _FOREIGN
    found: dict[str, Tensor] = {}
    seen = {id(thing)}
    level: list[tuple[str, object]] = [("", thing)]
    while level:
        nearer, level = level, []
        for name, value in (item for outer, holder in nearer for item in _inner(outer, holder)):
            if id(value) in seen or (leave_out is not None and leave_out(name, value)):
                continue
            if isinstance(value, Tensor):
                seen.add(id(value))
                found[name] = value
            elif isinstance(value, (list, tuple, set, Mapping)) or _package(value) in packages:
                seen.add(id(value))
                level.append((name, value))
    return found


def _inner(outer: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((f"{outer}[{key!r}]", item) for key, item in list(value.items()))
        return
    if isinstance(value, (list, tuple, set)):
        yield from ((f"{outer}[{i}]", item) for i, item in enumerate(value))
    held: dict[str, Any] = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            member: Any = cls.__dict__.get(slot)
            if slot not in held and isinstance(member, MemberDescriptorType):
                with suppress(AttributeError):  # declared, and not set
                    held[slot] = member.__get__(value)
    dot = f"{outer}." if outer else ""
    yield from ((f"{dot}{name}", item) for name, item in held.items())


def _package(value: object) -> str:
    return "" if isinstance(value, type) else type(value).__module__.partition(".")[0]


def _what(value: object) -> str:
    if isinstance(value, Tensor):
        return f"layout {value.layout} on {value.device}"
    return type(value).__name__


def _outermost(
    found: Mapping[tuple[torch.device, int, int], list[tuple[str, Tensor]]],
) -> Sequence[list[tuple[str, Tensor]]]:
    """The tensors by storage; a storage within another one (memory wrapped again) joins the outer one."""
    keys = sorted(found, key=lambda key: -key[2])
    kept: dict[tuple[torch.device, int, int], list[tuple[str, Tensor]]] = {}
    for key in keys:
        device, start, size = key
        around = (k for k in kept if k[0] == device and k[1] <= start and start + size <= k[1] + k[2])
        kept.setdefault(next(around, key), []).extend(found[key])
    order = {key: i for i, key in enumerate(found)}
    return [kept[key] for key in sorted(kept, key=lambda key: order[key])]
