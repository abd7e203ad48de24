"""`LaunchCache`: launches and arguments kept for a region by the kernels' host side, so that a forward costs little."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from canary_core.batch import BatchView, SlotTable


class Arguments(NamedTuple):
    """Consecutive arguments of a kernel, some of them named tuples: as seen by Triton's compiler, as passed to a
    compiled kernel (addresses for tensors), and a number for everything about them that compiled code may depend on."""

    objects: tuple[Any, ...]
    raw: list[Any]
    kind: int


LATE_S = 0.1
"""Seconds from which on a launch counts as held up by a compiler."""


class LateCompiles:
    """Launches that waited for a compiler although everything was compiled at the start (``begun``), of all Canaries of
    the process: the engine waited, too."""

    def __init__(self) -> None:
        self.begun = False
        self.count = 0
        self.untold: dict[str, float] = {}
        """Seconds by kernel since the last `take`."""

    def note(self, kernel: str, seconds: float) -> None:
        """A launch of ``kernel`` took so long."""
        if self.begun and seconds >= LATE_S:
            self.count += 1
            self.untold[kernel] = self.untold.get(kernel, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Seconds by kernel since the last call."""
        untold, self.untold = self.untold, {}
        return untold


LATE = LateCompiles()


class Numbers(NamedTuple):
    """Compile-time translation of a table's numbers to slots: rows and slots of a ``pool_page``, slots and rows of a
    ``page_ring``, 0 where there is none, and tokens of a slot."""

    POOL_ROWS: int
    POOL_SLOTS: int
    RING_PAGE: int
    RING_ROWS: int
    GROUP: int

    @classmethod
    def of(cls, pool_page: tuple[int, int] | None, page_ring: tuple[int, int] | None, tokens: int = 1) -> "Numbers":
        """The translation by both."""
        return cls(*(pool_page or (0, 0)), *(page_ring or (0, 0)), tokens)


class TableConstants(NamedTuple):
    """Compile-time constants of a batch: constants of the engine, and the rows rounded up to one of
    `kernels.launch.ROW_STEPS`. `ALIGN`: a region's ``group_tokens``, -1 where it is chunked. The last ones are
    `Numbers`: kernels of Triton up to 3.7 take no tuple within a tuple further than one call."""

    PAGE_SIZE: int
    RING: int
    STORED: int
    WINDOW: int
    ALIGN: int
    ROWS: int
    POOL_ROWS: int
    POOL_SLOTS: int
    RING_PAGE: int
    RING_ROWS: int
    GROUP: int


class Launch(Protocol):
    """A kernel with its arguments common to all forwards. columns: see `kernels.launch.Launcher`."""

    columns: int

    def __call__(self, grid: tuple[int, int], given: Arguments = ...) -> None:
        """Launches on the current stream, with ``given`` after the common arguments."""

    def ready(self, grid: tuple[int, int], given: Arguments) -> bool:
        """Whether such a launch needs no compilation; otherwise compilation begins in a thread."""


class GroupLaunch(NamedTuple):
    """A kernel that reads bytes, for one source group. blocks: programs sharing the group's sources; programs: programs
    over slots that fill the device then; slots, abreast: fields of the tile compiled in."""

    blocks: int
    programs: int
    slots: int
    abreast: int
    launch: Launch


class TableLaunches(NamedTuple):
    """The launches, by op, of batches with the same compile-time constants."""

    constants: TableConstants
    by_op: dict[str, Launch]


class BatchArguments(NamedTuple):
    """Kernel arguments of a batch, cached by (batch, table). numbers: the arguments in ``given`` other than addresses;
    the same for many forwards."""

    batch: BatchView
    table: SlotTable
    numbers: Arguments
    given: Arguments
    launches: TableLaunches


Key = tuple[str, TableConstants | None]
"""An op, and the compile-time constants of a batch, if it has any."""

TableKey = tuple[int, int, int, tuple[int, int] | None, int]
"""The parts of `TableConstants` that differ from batch to batch: a table's page size, ring, stored tokens and pool
page, and the number of a step of batch rows."""


class LaunchCache:
    """Cached launches on one region, addresses of the region's tensors included: replacing a tensor requires `clear`.

    by_op: the launch of each op. by_table: launches of ops with compile-time constants of a batch. by_group: of each op
    that reads bytes, one for each group of sources. batch: the kernels' arguments of the last batch, common to several
    ops of a forward. listed: the arguments of the scrub, without a probe and with one. compiling: whether a process
    compiles for the region just now, so that an op for which two others can stand has to wait.
    """

    __slots__ = ("batch", "by_group", "by_op", "by_table", "compiling", "listed")

    def __init__(self) -> None:
        self.by_op: dict[str, Launch] = {}
        self.by_table: dict[TableKey, TableLaunches] = {}
        self.by_group: dict[Key, list[GroupLaunch]] = {}
        self.batch: BatchArguments | None = None
        self.listed: dict[bool, Arguments] = {}
        self.compiling: Callable[[], bool] = bool

    def clear(self) -> None:
        """Forgets all launches: a tensor of the region was replaced, or a source has another shape."""
        self.by_op.clear()
        self.by_table.clear()
        self.by_group.clear()
        self.listed.clear()
        self.batch = None
