"""`TableCheck`: now and then, whether attention was given the slots that the engine keeps for its requests."""

from collections.abc import Sequence

import torch

from canary_core.batch import ReadTable
from canary_core.errors import AttachError
from canary_core.events import Event
from canary_core.runtime.streams import capturing, current
from canary_core.runtime.workspace import Switch, Workspace


class TableCheck:
    """Compares tables that attention backends are given (`ReadTable`) with those that the engine keeps.

    Backends make lists and page tables of their own for each forward, or keep them in the buffers of CUDA graphs; the
    check of a forward sees only what they are made from. An engine's plugin asks before each forward whether a
    comparison is `due`, and if so gives `compare` what it can: once the backend has its tables, and while nobody writes
    to what they were made from. Every ``interval`` forwards one table is compared whole, one after the other; in such a
    forward there is no scrub, so that no forward has a launch more, but where every forward is compared. 0: never.

    ``names``: the names of the tables that were compared, by their number in a finding.
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
        self.rows_left = 0
        """Rows of compared tables that did not fit in one comparison and wait for a later one."""
        self.tables_left = 0
        """Tables that lay ready beside one that was compared, and wait for a later turn."""

    @property
    def due(self) -> bool:
        """Whether tables of the forward that comes, or runs, are to be compared. See `skip` for where they can't be."""
        return self._forwards >= self._interval > 0 and self._switch.enabled and not self.paused

    def compare(self, tables: Sequence[ReadTable]) -> None:
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
        """The tables of this forward can't be judged; those of the next one are due, after more such forwards in a row
        those of the second, fourth and so on, at last of each ``interval``-th: to try costs the host something."""
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
        """What was compared so far; nothing where nothing was."""
        counts = {
            "tables_compared": self.compared,
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
        """What the current stream does from now on comes after the last comparison."""
        if self._done is not None:
            self._done.wait(current(self._workspace.device))

    def _launch(self, table: ReadTable) -> None:
        state = self._workspace.states.get(table.region)
        if state is None or state.region.tokens_per_slot != 1 or table.writers.device != self._workspace.device:
            raise AttachError(
                f"{table.name}: it must be of a guarded region of one token a slot, on {self._workspace.device}, got "
                f"{table.region!r} on {table.writers.device}; correct the adapter that gives it"
            )
        if table.name not in self.names:
            self.names.append(table.name)
        backend = self._workspace.backend
        # Where every forward is compared, the engine waits for the compiler rather than that one is left out.
        if not backend.compare_tables(state, table, self.names.index(table.name), self._interval == 1):
            self.skipped += 1
            return
        self._launched = True
        self.compared += 1
        if self._workspace.device.type == "cuda":
            if self._done is None:
                self._done = torch.cuda.Event()
            self._done.record(current(self._workspace.device))
