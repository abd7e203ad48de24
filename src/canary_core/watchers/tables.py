"""`TableCheck`: at intervals, whether attention was given the slots and lengths in the engine's own tables."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from canary_core.errors import AttachError
from canary_core.events import Event
from canary_core.runtime.streams import capturing, current
from canary_core.runtime.workspace import Switch, Workspace

if TYPE_CHECKING:
    from canary_core.read_table import ReadTable


class TableCheck:
    """Compares tables given to attention backends (`ReadTable`), and their lengths, with the engine's own.

    Backends make lists and page tables of their own for each forward, or keep them in the buffers of CUDA graphs; the
    check of a forward sees only their origin. An engine's plugin asks before each forward whether a comparison is
    `due`, and if so passes its tables to `compare`: once the backend has its own, and while nobody writes to the
    engine's. Every ``interval`` forwards one table is compared whole, one after the other; such a forward has no scrub,
    so that no forward has an extra launch, except if every forward is compared. 0: never.

    ``names``: names of the compared tables and lengths, by their number in a finding.
    """

    def __init__(self, workspace: Workspace, switch: Switch, interval: int) -> None:
        self._workspace = workspace
        self._switch = switch
        self._interval = interval
        # The first forward is compared.
        self._forwards = interval
        self._turn = self._skips = 0
        self._launched = False
        self._done: torch.cuda.Event | None = None
        self._left_out: set[str] = set()
        self.paused = False
        """Nothing is due meanwhile."""
        self.names: list[str] = []
        self.compared = 0
        """How many tables."""
        self.skipped = 0
        """How often a table was due and could not be judged."""
        self.lens_compared = 0
        """How often lengths were, with a table or alone."""
        self.rows_left = 0
        """Rows of compared tables beyond one comparison, left for a later one."""
        self.tables_left = 0
        """Tables ready beside a compared one, left for a later turn."""

    @property
    def due(self) -> bool:
        """Whether tables of the next, or running, forward are to be compared. If they can't be: `skip`."""
        return self._forwards >= self._interval > 0 and self._switch.enabled and not self.paused

    def compare(self, tables: "Sequence[ReadTable]") -> None:
        """Compares one of ``tables``, another one each time, with one launch on the current stream: before `Step`
        records the forward, and where the current stream has what both tables hold. None are told as `skip`. Never
        captured: within a graph it does nothing. In log mode an exception of ours goes no further."""
        if not self.due or capturing(self._workspace.device):
            return
        with self._switch.guard("step.tables.compare"):
            if not tables:
                self.skip()
                return
            table = tables[self._turn % len(tables)]
            self._turn += 1
            self.tables_left += len(tables) - 1
            self._forwards = self._skips = 0
            self._launch(table)

    def skip(self) -> None:
        """The tables of the forward can't be judged; the next forward's are due, after more such forwards in a row the
        second, fourth and so on, and finally each ``interval``-th: a try costs the host something."""
        self.skipped += 1
        pause = min(1 << min(self._skips, 16), self._interval)
        self._skips += 1
        self._forwards = self._interval - pause

    def leave_out(self, backend: str, reason: str) -> None:
        """Tables of ``backend`` are not compared, and why: told once for each."""
        if backend not in self._left_out and self._switch.enabled:
            self._left_out.add(backend)
            self._switch.tell(Event("tables_left_out", "info", {"backend": backend, "reason": reason}))

    def stats(self) -> dict[str, int]:
        """Counts of comparisons so far; zeros are left out."""
        counts = {
            "tables_compared": self.compared,
            "lengths_compared": self.lens_compared,
            "tables_skipped": self.skipped,
            "tables_left": self.tables_left,
            "table_rows_left": self.rows_left,
        }
        return {name: count for name, count in counts.items() if count}

    def took_turn(self) -> bool:
        """Whether something was compared in the place of a scrub since this was last asked. Where every forward is
        compared, there would be no scrub at all."""
        launched, self._launched = self._launched, False
        return launched and self._interval > 1

    def ended(self) -> None:
        """Host only. A forward ended."""
        self._forwards += 1

    def follow(self) -> None:
        """Later work of the current stream waits for the last comparison."""
        if self._done is not None:
            self._done.wait(current(self._workspace.device))

    def _launch(self, table: "ReadTable") -> None:
        state = self._workspace.states.get(table.region)
        if state is None or state.region.tokens_per_slot != 1 or table.writers.device != self._workspace.device:
            raise AttachError(
                f"{table.name}: it must be of a guarded region of one token a slot, on {self._workspace.device}, got "
                f"{table.region!r} on {table.writers.device}; correct the adapter that gives it"
            )
        names = [self._number(name) for name in (table.name, *(lens.name for lens in table.lens))]
        backend = self._workspace.backend
        # Where every forward is compared, the engine waits for the compiler rather than that one is left out.
        if not backend.compare_tables(state, table, names, self._interval == 1):
            self.skipped += 1
            return
        self._launched = True
        self.compared += table.first is not table.end
        self.lens_compared += bool(table.lens)
        if self._workspace.device.type == "cuda":
            if self._done is None:
                self._done = torch.cuda.Event()
            self._done.record(current(self._workspace.device))

    def _number(self, name: str) -> int:
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)
