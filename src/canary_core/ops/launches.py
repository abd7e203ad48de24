"""`LaunchCache`: what the kernels' host side remembers of a region, so that a forward costs it as little as can be."""

from typing import Any, NamedTuple, Protocol

from canary_core.batch import BatchView, SlotTable


class Arguments(NamedTuple):
    """Consecutive arguments of a kernel: as Triton's compiler wants to see them, as a compiled kernel takes them
    (addresses for tensors), and a number that stands for all that compiled code may depend on in them."""

    objects: tuple[Any, ...]
    raw: list[int | None]
    kind: int


class TableConstants(NamedTuple):
    """Compile-time constants of a batch: what is fixed for an engine, and its rows rounded up to one of
    `kernels.launch.ROW_STEPS`.

    `ALIGN`: a region's ``group_tokens``. `POOL`: how a table's numbers become slots; rows and slots of a ``pool_page``,
    slots and rows of a ``page_ring``, 0 where there is none.
    """

    PAGE_SIZE: int
    RING: int
    STORED: int
    WINDOW: int
    ALIGN: int
    POOL: tuple[int, int, int, int]
    GROUP: int
    ROWS: int


class Launch(Protocol):
    """A kernel with all that stays the same from forward to forward. columns: see `kernels.launch.Launcher`."""

    columns: int

    def __call__(self, grid: tuple[int, int], given: Arguments = ...) -> None:
        """Launches on the current stream with ``given`` after the arguments that stay the same."""

    def ready(self, grid: tuple[int, int], given: Arguments) -> bool:
        """Whether nothing has to be compiled for that; if something has, it begins in a thread."""


class GroupLaunch(NamedTuple):
    """A kernel that reads bytes, for one source group. blocks: how many programs share its sources; programs: how many
    over slots fill the device then; slots, abreast: those of the tile that it was compiled for."""

    blocks: int
    programs: int
    slots: int
    abreast: int
    launch: Launch


class TableLaunches(NamedTuple):
    """The launches, by op, of batches that have the same compile-time constants."""

    constants: TableConstants
    by_op: dict[str, Launch]


class BatchArguments(NamedTuple):
    """What kernels need of one batch, and which batch and table that is. numbers: those of ``given`` that are no
    addresses; they stay the same for many forwards."""

    batch: BatchView
    table: SlotTable
    numbers: Arguments
    given: Arguments
    launches: TableLaunches


Key = tuple[str, TableConstants | None]
"""An op, and the compile-time constants of a batch if it has any."""

TableKey = tuple[int, int, int, tuple[int, int] | None, int]
"""What differs in `TableConstants` from batch to batch: a table's page size, ring, stored tokens and pool page, and the
number of a step of batch rows."""


class LaunchCache:
    """What was worked out for launches on one region. Addresses of the region's tensors are among it: whoever puts
    another tensor in the place of one must call `clear`.

    by_op: the launch of each op. by_table: those of ops that have compile-time constants of a batch. by_group: of each
    op that reads bytes, one for each group of sources. batch: the kernels' arguments of the last batch, which several
    ops of a forward take. listed: the argument of the scrub.
    """

    __slots__ = ("batch", "by_group", "by_op", "by_table", "listed")

    def __init__(self) -> None:
        self.by_op: dict[str, Launch] = {}
        self.by_table: dict[TableKey, TableLaunches] = {}
        self.by_group: dict[Key, list[GroupLaunch]] = {}
        self.batch: BatchArguments | None = None
        self.listed: Arguments | None = None

    def clear(self) -> None:
        """Forgets everything: a tensor of the region was replaced, or a source has another shape."""
        self.by_op.clear()
        self.by_table.clear()
        self.by_group.clear()
        self.batch = self.listed = None
