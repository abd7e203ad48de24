"""`CompileJob`: Triton's compilation of a launch, as data for another process.

Both processes pass the job to `triton.compile`, so both come to the same entry of Triton's disk cache.
"""

import hashlib
import importlib
import io
import pickle
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

COMPILED = "canary"
"""Name of an empty file in Triton's cache: certain jobs are done."""


@dataclass(frozen=True, slots=True)
class CompileJob:
    """The arguments of one call of `triton.compile`: an ``ASTSource`` with kernel, types and constants, the GPU, and
    options such as ``num_warps``."""

    source: Any
    target: Any
    options: dict[str, Any]
    key: str = field(init=False)
    """The job's name, the same in another start unless the kernel's code or Triton has changed."""

    def __post_init__(self) -> None:
        settle_name(self.source.fn)
        parts = triton.__version__, self.source.hash(), self.target, sorted(self.options.items())
        object.__setattr__(self, "key", hashlib.sha256(repr(parts).encode()).hexdigest())

    def compile(self) -> Any:
        """Compiles into the cache, or finds the entry there."""
        return triton.compile(self.source, target=self.target, options=self.options)


_named: set[int] = set()


def settle_name(kernel: Any) -> None:
    """Has Triton compute the name of ``kernel`` in its cache, those of the functions that it calls before it. Up to
    Triton 3.8 the name depends on which of them have one by then: so on which kernel a process looks at first."""
    if not isinstance(kernel, JITFunction) or id(kernel) in _named:
        return
    _named.add(id(kernel))
    for called in kernel.fn.__code__.co_names:
        settle_name(kernel.fn.__globals__.get(called))
    kernel.cache_key  # noqa: B018  (a property that does it)


class _Told(Exception):
    """Leaves Triton's `JITFunction.run` with the job in place of a compilation."""

    def __init__(self, job: CompileJob) -> None:
        self.job = job


def job_of(kernel: Any, warm_up: Callable[[], object]) -> CompileJob | None:
    """The compilation that ``warm_up``, a call of ``kernel.warmup``, would do; None if already done in this process.
    Compiles nothing. Raises `RuntimeError` for a Triton unlike the releases read (3.4 to 3.9)."""
    try:
        # Triton sets the attribute when it meets a device, and calls it to compile.
        kernel.device_caches[triton.runtime.driver.active.get_current_device()]
        known = kernel.compile is triton.compile
    except AttributeError:
        known = False
    if not known:
        raise RuntimeError(f"triton {triton.__version__} can't be asked what it compiles")
    here = threading.get_ident()

    def tell(source: Any, target: Any, options: dict[str, Any], **rest: Any) -> Any:
        if threading.get_ident() != here:
            return triton.compile(source, target=target, options=options, **rest)
        raise _Told(CompileJob(source, target, options))

    kernel.compile = tell
    try:
        warm_up()
    except _Told as told:
        return told.job
    finally:
        kernel.compile = triton.compile
    return None


class _Pickler(pickle.Pickler):
    def persistent_id(self, thing: Any) -> Any:
        """A kernel is named: its code need not travel."""
        return (thing.fn.__module__, thing.fn.__qualname__) if isinstance(thing, JITFunction) else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, name: Any) -> Any:
        """The kernel of a name."""
        module, kernel = name
        return getattr(importlib.import_module(module), kernel)


def pack(jobs: Sequence[CompileJob]) -> bytes:
    """For `unpack` in another process."""
    packed = io.BytesIO()
    _Pickler(packed).dump([(job.source, job.target, job.options) for job in jobs])
    return packed.getvalue()


def unpack(packed: bytes) -> list[CompileJob]:
    """The jobs packed by `pack`."""
    return [CompileJob(*parts) for parts in _Unpickler(io.BytesIO(packed)).load()]


class Stamp:
    """A note in Triton's cache that ``jobs`` are done. The note may outlive deleted entries."""

    def __init__(self, jobs: Sequence[CompileJob]) -> None:
        keys = "".join(sorted(job.key for job in jobs))
        self._place = get_cache_manager(hashlib.sha256(keys.encode()).hexdigest())

    @property
    def there(self) -> bool:
        """Whether the note is there."""
        return self._place.get_file(COMPILED) is not None

    def put(self) -> None:
        """Makes the note, if the cache can be written to."""
        with suppress(OSError):
            self._place.put(b"", COMPILED)

    @property
    def folder(self) -> Path | None:
        """The note's folder in Triton's cache; None if the cache is no folder."""
        folder = getattr(self._place, "cache_dir", None)
        return None if folder is None else Path(folder)
