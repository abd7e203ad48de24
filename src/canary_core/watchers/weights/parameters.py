"""`Parameters`: where the bytes of a model's parameters and buffers lie, each byte once."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from canary_core.ops.weights import WeightRange

UNCOUNTED = -1
"""In the place of the version of an inference tensor."""

GONE = (0, 0, 0)
"""The tag of a lost tensor."""

Tag = tuple[int, int, int]
"""Object, version counter and address of a tensor."""


class ParameterHolder:
    """A parameter's or buffer's place in a module; never the tensor itself, so that the engine can free the memory.
    ``path``: the way to the plain tensor, within a tensor made of others."""

    __slots__ = ("_module", "_name", "buffer", "name", "path")

    def __init__(self, name: str, module: nn.Module, buffer: bool, path: tuple[str, ...] = ()) -> None:
        self.name = name
        self.buffer = buffer
        self.path = path
        self._module = ref(module)
        self._name = name.rpartition(".")[2]

    def outer(self) -> Tensor | None:
        """The parameter, or buffer, in the module now."""
        module = self._module()
        if module is None:
            return None
        held: Any = (module._buffers if self.buffer else module._parameters).get(self._name)
        return held if isinstance(held, Tensor) else None

    def plain(self) -> Tensor | None:
        """The plain tensor now."""
        tensor: Any = self.outer()
        for name in self.path:
            tensor = getattr(tensor, name, None)
        return tensor if isinstance(tensor, Tensor) else None

    def tag(self) -> Tag:
        """Another one wherever torch knows of a possible change of the content."""
        outer, plain = self.outer(), self.plain()
        if outer is None or plain is None:
            return GONE
        try:
            return id(outer), UNCOUNTED if outer.is_inference() else outer._version, plain.data_ptr()
        except RuntimeError:
            return GONE


@dataclass(slots=True, eq=False)
class WeightStretch:
    """Bytes in memory, of one tensor or of several with the same memory. ``begins``: the place of the first byte, from
    the first element of the first holder's tensor. ``shape`` and ``strides``: of the first holder's tensor, in
    elements.

    disturbed: rounds over the weights at the last rightful change of the content. unsure: number of uncertain changes.
    """

    holders: list[ParameterHolder]
    range: WeightRange
    begins: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    tags: tuple[Tag, ...] = ()
    disturbed: int = 0
    unsure: int = 0
    left_out: bool = False

    @property
    def name(self) -> str:
        """The first holder's, with the names of other holders of the memory."""
        names = list(dict.fromkeys(holder.name for holder in self.holders))
        return names[0] + (f" (also {', '.join(names[1:3])}{', ...' if len(names) > 3 else ''})" if names[1:] else "")

    @property
    def buffer(self) -> bool:
        """Whether the memory is of no parameter."""
        return all(holder.buffer for holder in self.holders)

    @property
    def elements(self) -> int:
        """How many there are."""
        return self.range.size_bytes // self.dtype.itemsize

    def moved(self) -> bool:
        """Whether torch knows of a change since the last call."""
        before, self.tags = self.tags, tuple(holder.tag() for holder in self.holders)
        return before != self.tags

    @property
    def there(self) -> bool:
        """Whether the bytes still are at the same address, as of the last `moved`."""
        return self.tags[0][2] == self.range.address - self.begins

    def place_of(self, byte: int) -> tuple[int, tuple[int, ...]]:
        """Number, in the order of the shape, and indices of the element with the ``byte``-th byte."""
        left = (self.begins + byte) // self.dtype.itemsize
        indices = [0] * len(self.shape)
        for dim in sorted(range(len(self.shape)), key=lambda d: -self.strides[d]):
            if self.shape[dim] > 1:
                indices[dim], left = divmod(left, self.strides[dim])
        number = 0
        for index, size in zip(indices, self.shape, strict=True):
            number = number * size + index
        return number, tuple(indices)


class Parameters:
    """The parameters and persistent buffers of ``models`` on ``device``, by memory: ``stretches``, in the order of
    addresses. Tensors with the same memory are one stretch. ``left_out``: names and reasons of the others."""

    def __init__(self, models: Iterable[nn.Module], device: torch.device) -> None:
        self.left_out: dict[str, str] = {}
        self.stretches: list[WeightStretch] = []
        found: list[tuple[int, int, int, ParameterHolder, Tensor]] = []
        for model in models:
            for holder, tensor in _held(model):
                reason = _unreadable(tensor, device)
                if reason is None:
                    found.append((tensor.data_ptr(), -tensor.nbytes, len(found), holder, tensor))
                elif reason:
                    self.left_out[holder.name] = reason
        end, last = 0, None
        # The longest of those that begin at one place first.
        for address, _, _, holder, tensor in sorted(found, key=lambda one: one[:3]):
            begin, close = max(address, end), address + tensor.nbytes
            if last is not None and address < end:
                # Its memory is, at least in part, of the one before.
                last.holders.append(holder)
            if begin < close:
                last = _stretch(holder, tensor, begin - address)
                self.stretches.append(last)
                end = close
        for stretch in self.stretches:
            stretch.moved()

    @property
    def parameters(self) -> int:
        """Number of guarded parameters and buffers; tied ones count once."""
        return len(self.stretches)


def _held(model: nn.Module) -> Iterator[tuple[ParameterHolder, Tensor]]:
    """The plain tensors of a model, with the holders."""
    for path, module in model.named_modules():
        passing = getattr(module, "_non_persistent_buffers_set", ())
        for held, buffer in ((module._parameters, False), (module._buffers, True)):
            for name, tensor in held.items():
                if tensor is not None and not (buffer and name in passing):
                    whole = f"{path}.{name}" if path else name
                    for inner, plain in _plain((), tensor):
                        yield ParameterHolder(whole, module, buffer, inner), plain


def _plain(path: tuple[str, ...], tensor: Any) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """The plain tensors inside of a parameter: the local shard of a sharded one, values and scales of a quantized
    one."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain((*path, name), getattr(tensor, name))
    elif isinstance(tensor, Tensor):
        yield path, tensor


def _unreadable(tensor: Tensor, device: torch.device) -> str | None:
    """Why the bytes are not compared, empty where there are none."""
    if tensor.is_meta:
        return "on the meta device"
    if tensor.device != device:
        return f"on {tensor.device}"
    if not tensor.numel():
        return ""
    try:
        if not tensor.data_ptr():
            return "without memory"
    except (RuntimeError, NotImplementedError):
        return "without memory of its own"
    return None if _dense(tensor) else "with gaps between its elements"


def _dense(tensor: Tensor) -> bool:
    """Whether the elements fill the memory without gaps, in any order of dimensions."""
    if tensor.layout is not torch.strided:
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _stretch(holder: ParameterHolder, tensor: Tensor, begins: int) -> WeightStretch:
    size = tensor.nbytes - begins

    def read() -> Tensor:
        plain = holder.plain()
        if plain is None:
            raise RuntimeError(f"{holder.name} is gone")
        at = plain.storage_offset() * plain.dtype.itemsize + begins
        return torch.empty(0, dtype=torch.uint8, device=plain.device).set_(plain.untyped_storage(), at, (size,), (1,))

    whole = WeightRange(tensor.data_ptr() + begins, size, read)
    return WeightStretch([holder], whole, begins, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


def counted(reasons: Sequence[str]) -> str:
    """Such as ``3 on the meta device, 1 on cpu``."""
    return ", ".join(f"{reasons.count(reason)} {reason}" for reason in dict.fromkeys(reasons))
