"""`Accesses`: which bytes every launch reads and writes, by address, and which two launches, or programs of one launch,
touch the same byte while nothing says which of them comes first."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton.runtime.interpreter as interpreter
from races.streams import MOST_STREAMS, Device
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

READ, WRITE, ATOMIC = range(3)
VERBS = ("reads", "writes", "counts in")
AGAINST = {READ: (WRITE, ATOMIC), WRITE: (READ, WRITE, ATOMIC), ATOMIC: (READ, WRITE)}
"""What may not happen beside what. Two that count in the same word do no harm."""

Numbers = np.ndarray[Any, Any]


class Memory:
    """The bytes of one tensor's storage. ``last``: the number of the last launch of each stream that read, wrote or
    counted in each byte."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.name = name
        self.kept = storage
        self.begin = storage.data_ptr()
        self.end = self.begin + storage.nbytes()
        self.last = np.zeros((3, MOST_STREAMS, storage.nbytes()), dtype=np.int32)


class Accesses:
    """Looks at the launches on ``device``: kernels of Triton's interpreter load by load and store by store, with their
    masks, and torch's own operators by the elements that they name. What is not watched is nobody's business.

    races: sentences about two launches, or two programs of one, that touch the same byte in no order, and about kernels
    that touch memory that they were not given, each told once.
    ``harmless``: given a launch's name, a memory's and offsets of bytes there that it reads, says of each whether
    nothing comes of it.
    """

    def __init__(self, device: Device, harmless: Callable[[str, str, Numbers], Numbers]) -> None:
        self.device = device
        self._harmless = harmless
        self.races: list[str] = []
        self.kernels: set[str] = set()
        """Names of those that were launched."""
        self._memories: list[Memory] = []
        self._begins = self._ends = np.zeros(0, dtype=np.int64)
        self._launch: str | None = None
        self._number = 0
        self._given: list[tuple[int, int]] = []
        # Of a kernel's launch, by memory: as `Memory.last`, the last program, from 1.
        self._programs: dict[int, Numbers] = {}

    def watch(self, name: str, tensor: Tensor) -> None:
        """From now on; the tensor is kept, so that its memory becomes nobody else's."""
        memory = Memory(name, tensor)
        if memory.begin == memory.end or any(known.begin == memory.begin for known in self._memories):
            return
        self._memories = sorted([*self._memories, memory], key=lambda known: known.begin)
        self._begins = np.array([known.begin for known in self._memories], dtype=np.int64)
        self._ends = np.array([known.end for known in self._memories], dtype=np.int64)

    def watches(self, tensor: Tensor) -> bool:
        """Whether it lies in watched memory."""
        begin = tensor.untyped_storage().data_ptr()
        return any(known.begin <= begin < known.end for known in self._memories)

    def given_back(self, name: str, tensors: Sequence[Tensor]) -> None:
        """The engine drops ``tensors``: torch's allocator hands their memory to the next who asks, on the forwards'
        stream, who writes there."""
        with self.device.on(self.device.main), self.launch(f"whoever gets the memory of {name}"):
            for tensor in tensors:
                self.touch_whole(WRITE, tensor)

    @contextmanager
    def launch(self, name: str) -> Iterator[None]:
        """What is touched within is one launch on the current stream."""
        outer, self._launch = self._launch, name
        self._number = self.device.now.launch(name)
        self._programs.clear()
        try:
            yield
        finally:
            self._launch = outer

    def touch(self, kind: int, addresses: Numbers, size: int) -> None:
        """The launch reads, writes or counts in ``size`` bytes at each address."""
        addresses = np.unique(addresses.astype(np.int64).ravel())
        which = np.searchsorted(self._begins, addresses, side="right") - 1
        if self._launch in self.kernels:
            self._require_given(kind, addresses[(which < 0) | (addresses + size > self._ends[which])], size)
        for n in np.unique(which[which >= 0]):
            memory = self._memories[n]
            inside = addresses[(which == n) & (addresses < memory.end)] - memory.begin
            if len(inside):
                places = (inside[:, None] + np.arange(size)).ravel()
                self._compare(kind, memory, places)
                if self._launch in self.kernels:
                    self._compare_programs(kind, memory, places)

    def touch_whole(self, kind: int, tensor: Tensor) -> None:
        """As `touch`, every element of ``tensor``."""
        self.touch(kind, addresses_of(tensor), tensor.element_size())

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Launches within are looked at."""
        native, call = interpreter._interpreter, interpreter.GridExecutor.__call__
        interpreter._interpreter = Interpreted(self, native)

        def launched(executor: Any, *args: Any, **kwargs: Any) -> None:
            self.kernels.add(executor.fn.__name__)
            storages = [t.untyped_storage() for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
            self._given = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
            with self.launch(executor.fn.__name__):
                call(executor, *args, **kwargs)

        interpreter.GridExecutor.__call__ = launched
        try:
            with Operators(self):
                yield
        finally:
            interpreter._interpreter, interpreter.GridExecutor.__call__ = native, call

    @property
    def in_kernel(self) -> bool:
        """Whether a launch is under way."""
        return self._launch is not None

    def _compare(self, kind: int, memory: Memory, places: Numbers) -> None:
        mine = self.device.now
        if kind == READ:
            places = places[~self._harmless(str(self._launch), memory.name, places)]
        for other in self.device.streams:
            if other is mine:
                continue
            for theirs in AGAINST[kind]:
                last = memory.last[theirs, other.number, places]
                unordered = last > mine.after[other.number]
                if unordered.any():
                    launch = other.launches[int(last[unordered].max()) - 1]
                    self._tell(
                        f"{self._launch} on {mine.name} {VERBS[kind]} {memory.name}, which {launch} on {other.name} "
                        f"{VERBS[theirs]}, in no order"
                    )
        memory.last[kind, mine.number, places] = self._number

    def _require_given(self, kind: int, elsewhere: Numbers, size: int) -> None:
        """``elsewhere``: what lies in no watched memory. It may be a tensor's that the kernel was given."""
        for begin, end in self._given if len(elsewhere) else ():
            elsewhere = elsewhere[(elsewhere < begin) | (elsewhere + size > end)]
        if len(elsewhere):
            self._tell(f"{self._launch} {VERBS[kind]} memory that nobody has given it")

    def _compare_programs(self, kind: int, memory: Memory, places: Numbers) -> None:
        x, y, _ = interpreter.interpreter_builder.grid_idx
        mine = 1 + x + (y << 16)
        last = self._programs.get(memory.begin)
        if last is None:
            last = self._programs[memory.begin] = np.zeros((3, memory.end - memory.begin), dtype=np.int32)
        for theirs in AGAINST[kind]:
            before = last[theirs, places]
            if ((before != 0) & (before != mine)).any():
                self._tell(f"a program of {self._launch} {VERBS[kind]} {memory.name}, which another {VERBS[theirs]}")
        last[kind, places] = mine

    def _tell(self, sentence: str) -> None:
        if sentence not in self.races:
            self.races.append(sentence)


class Interpreted:
    """In the place of the interpreter's native half: every load and store goes through it."""

    def __init__(self, accesses: Accesses, native: Any) -> None:
        self._accesses = accesses
        self._native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def load(self, pointers: Numbers, mask: Numbers, other: Numbers, dtype: Any) -> Any:
        self._accesses.touch(READ, pointers[mask.astype(bool)], np.dtype(dtype).itemsize)
        return self._native.load(pointers, mask, other, dtype)

    def store(self, pointers: Numbers, value: Numbers, mask: Numbers) -> Any:
        self._accesses.touch(WRITE, pointers[mask.astype(bool)], value.dtype.itemsize)
        return self._native.store(pointers, value, mask)

    def atomic_rmw(self, what: Any, pointers: Numbers, value: Numbers, mask: Numbers, *more: Any) -> Any:
        self._accesses.touch(ATOMIC, pointers[mask.astype(bool)], value.dtype.itemsize)
        return self._native.atomic_rmw(what, pointers, value, mask, *more)

    def atomic_cas(self, pointers: Numbers, compared: Numbers, value: Numbers, *more: Any) -> Any:
        self._accesses.touch(ATOMIC, pointers, value.dtype.itemsize)
        return self._native.atomic_cas(pointers, compared, value, *more)


class Operators(TorchDispatchMode):
    """torch's operators outside of kernels: each is a launch."""

    def __init__(self, accesses: Accesses) -> None:
        super().__init__()
        self._accesses = accesses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        touched = [] if self._accesses.in_kernel else list(self._touched(func, args, kwargs))
        if touched:
            with self._accesses.launch(str(func)):
                for kind, tensor, addresses in touched:
                    self._accesses.touch(kind, addresses, tensor.element_size())
        return func(*args, **kwargs)

    def _touched(self, func: Any, args: Any, kwargs: Any) -> Iterator[tuple[int, Tensor, Numbers]]:
        schema = func._schema
        if any(given.alias_info is not None and not given.alias_info.is_write for given in schema.returns):
            return  # a view
        given = [*zip(schema.arguments, args, strict=False)]
        given += [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]
        for place, (argument, value) in enumerate(given):
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, Tensor) and self._accesses.watches(tensor):
                    kind = WRITE if argument.alias_info is not None and argument.alias_info.is_write else READ
                    chosen = CHOSEN.get(func.overloadpacket.__name__) if place == 0 else None
                    addresses = addresses_of(tensor)
                    yield kind, tensor, addresses if chosen is None else chosen(addresses, *args[1:])


def addresses_of(tensor: Tensor) -> Numbers:
    """The address of each element, int64, in the tensor's shape."""
    offsets = np.full(tuple(tensor.shape), tensor.data_ptr(), dtype=np.int64)
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        along = np.arange(size, dtype=np.int64) * stride * tensor.element_size()
        offsets += along.reshape([-1 if i == axis else 1 for i in range(tensor.dim())])
    return offsets


def _numpy(index: Tensor | None) -> Any:
    return slice(None) if index is None else index.detach().numpy()


def _indexed(addresses: Numbers, indices: Sequence[Tensor | None], *rest: Any) -> Numbers:
    chosen: Numbers = addresses[tuple(_numpy(index) for index in indices)]
    return chosen


def _along(addresses: Numbers, axis: int, index: Tensor, *rest: Any) -> Numbers:
    return np.take(addresses, _numpy(index), axis)


def _gathered(addresses: Numbers, axis: int, index: Tensor, *rest: Any) -> Numbers:
    return np.take_along_axis(addresses, _numpy(index), axis)


CHOSEN: dict[str, Callable[..., Numbers]] = {
    "index": _indexed,
    "index_put_": _indexed,
    "_index_put_impl_": _indexed,
    "index_select": _along,
    "index_copy_": _along,
    "index_fill_": _along,
    "gather": _gathered,
    "scatter_": _gathered,
}
"""Operators of which the first argument's elements are touched where others say."""
