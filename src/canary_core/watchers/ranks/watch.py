"""`RankWatch`: this rank's forwards as sums for the others of the group, compared by one of the ranks."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from canary_core.batch import BatchView
from canary_core.events import Event
from canary_core.ops.state import RegionState, token_region
from canary_core.runtime.host_copy import HostCopy
from canary_core.runtime.streams import capturing
from canary_core.runtime.workspace import Switch, Workspace
from canary_core.runtime.writers import Writers
from canary_core.violation import Violation
from canary_core.watchers.ranks.board import ROWS, RankBoard
from canary_core.watchers.ranks.digest import (
    MOST_SOURCES,
    MOST_TOKENS,
    RankWord,
    digest_weights,
    forward_digest,
    sampled_digest,
)
from canary_core.watchers.ranks.group import RankGroup
from canary_core.watchers.ranks.judge import RankJudge, RankRows
from canary_core.watchers.ranks.wording import finding, introduction

PATIENCE = 8
"""Own later rows after which another rank's row counts as missing."""

BLIND = 8
"""Consecutive missing rows until an event."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A forward on the way to the host: view, ``number`` and step, the words known to the host, and copies of the
    device's words."""

    view: BatchView
    number: int
    step: int
    conditions: int
    made: HostCopy | None = None
    sampled: HostCopy | None = None


class RankWatch:
    """Compares every ``CANARY_RANKS_INTERVAL``-th forward between ranks that must compute the same batches: lengths,
    positions, tokens, slots, the tokens computed before, sampled tokens, and KV that several ranks hold alike.

    A plugin calls `join` once, where several ranks compute the same, and `comes` for each forward of the engine, on all
    ranks alike. Each rank adds up a forward in some small launches behind the record, reads the sums late, and
    writes the sums to a `RankBoard`; the lowest rank there compares rows of the same number. No rank waits for another
    rank, and nothing is sent by the engine's own channels. Each machine has a board.
    """

    def __init__(self, workspace: Workspace, switch: Switch) -> None:
        self._workspace = workspace
        self._switch = switch
        self._interval = workspace.config.ranks_interval
        self.report: Callable[[Iterable[Violation]], object] = list
        """Takes findings."""
        self.writers = Writers()
        """Knows whether weights were changed, and whether content stands in the place of tokens."""
        self._number = 0
        self._state: RegionState | None = None
        self._board: RankBoard | None = None
        self._judge: RankJudge | None = None
        self._odd = torch.empty(0)
        self._begun: list[_Pending] = []
        self._last = 0
        self._mine: deque[int] = deque(maxlen=ROWS)
        self._missing: dict[int, int] = {}
        self._told: set[str] = set()
        self._episodes: set[tuple[int, ...]] = set()
        self.written = 0
        """Forwards of this rank that others can compare."""
        self.missed = 0
        """Rows of other ranks that did not come."""
        self.left_out = 0
        """Forwards of this rank that were due, and not written."""
        self.differing = 0
        """Forwards in which ranks differed."""

    def join(self, group: RankGroup) -> None:
        """Takes part as a rank of ``group``. Does nothing with one rank, or when called again; a failure is an event.
        Before the first forward, never captured."""
        if self._board is not None or group.size < 2 or not self._switch.enabled:
            return
        with self._switch.guard("step.ranks.join"):
            state = token_region(self._workspace.states)
            if state is None:
                self._blind("no region has one token a slot", [])
                return
            layers = [label.layer for label in state.sources.judged][:MOST_SOURCES]
            folder = self._workspace.config.control_folder()
            try:
                board = RankBoard(folder, group, self._interval, RankWord.KV + len(layers))
            except OSError as error:
                self._blind(f"ranks can't meet in {folder}: {error}", [])
                return
            board.say(introduction(self._switch.place, group, state.sources))
            self._odd = digest_weights(self._workspace.device)
            self._judge = RankJudge(group.slots, layers)
            self._state, self._board = state, board

    def comes(self, alike: bool = True) -> None:
        """A forward of the engine comes next, guarded or not; on all ranks alike. ``alike``: whether the batch must be
        the same on all ranks; otherwise the forward is numbered, and not compared."""
        self._number += 1
        if not alike and self._board is not None and self._number % self._interval == 0:
            self._last = self._number
            self.left_out += 1

    def begin(self, view: BatchView, step: int) -> None:
        """Host only. The forward of ``view``, the ``step``-th, is checked next; the first one since `comes` counts."""
        number = self._number
        if number % self._interval or number == self._last or self._state is None:
            return
        if self._state.region.name in view.tables:
            self._last = number
            conditions = self.writers.identities.weights << 1 | (self.writers.any_contents is not None)
            # A record that is issued late has a later check before it.
            self._begun = [*self._begun[-3:], _Pending(view, number, step, conditions)]

    def recorded(self, view: BatchView) -> None:
        """The forward of ``view`` has just been recorded, on the current stream."""
        pending = self._of(view)
        if pending is None or self._state is None:
            return
        if capturing(self._workspace.device):
            self._begun.remove(pending)
            self.left_out += 1
            self._blind("Canary's work is part of CUDA graphs, which are the same for every forward", [])
            return
        made = forward_digest(self._state, view, self._odd, bool(pending.conditions & 1))
        pending.made = HostCopy(made)

    def sampled(self, view: BatchView, tokens: Tensor, without: Sequence[int]) -> None:
        """``tokens`` were sampled for the forward of ``view``, see `SampledTokens.give`; on the stream of the
        forwards."""
        pending = self._of(view)
        if pending is None or pending.made is None or pending.sampled is not None:
            return
        if max(tokens.shape) <= MOST_TOKENS and not capturing(self._workspace.device):
            pending.sampled = HostCopy(sampled_digest(tokens, tuple(without), self._odd).view(1))

    def send(self) -> None:
        """Nothing: copies were begun where sums were made."""

    def read(self) -> None:
        """Writes the arrived sums of this rank's forwards, and compares the present rows of all ranks. Never waits."""
        board, judge = self._board, self._judge
        if board is None or judge is None or not self._switch.enabled:
            return
        with self._switch.guard("step.ranks.read"):
            self._write(board)
            ranks = [rank for rank in range(board.group.size) if rank == board.group.rank or board.about(rank)]
            if min(ranks) == board.group.rank:
                self._compare(board, judge, ranks)

    def close(self) -> None:
        """The Canary is off: this rank writes and compares no more."""
        if self._board is not None:
            self._board.close()
        self._board = self._state = None
        self._begun.clear()

    def stats(self) -> dict[str, int]:
        """Counts by name, without zeros."""
        judge = self._judge
        told = {
            "ranks_written": self.written,
            "ranks_left_out": self.left_out,
            "ranks_missed": self.missed,
            "ranks_differing": self.differing,
            "ranks_compared": judge.compared if judge is not None else 0,
            "ranks_compared_samples": judge.compared_samples if judge is not None else 0,
            "ranks_compared_kv": judge.compared_kv if judge is not None else 0,
            "ranks_unsure": judge.unsure if judge is not None else 0,
        }
        return {name: number for name, number in told.items() if number}

    def _of(self, view: BatchView) -> _Pending | None:
        return next((pending for pending in self._begun if pending.view is view), None) if self._begun else None

    def _write(self, board: RankBoard) -> None:
        """Writes the rows of finished forwards: a later forward has begun, or tokens were sampled."""
        going: list[_Pending] = []
        for pending in self._begun:
            if pending.made is None:
                if pending.number >= self._number - self._interval:
                    going.append(pending)
                else:
                    # It failed, or its record was never issued.
                    self.left_out += 1
                continue
            over = pending.sampled is not None or pending.number < self._number
            if not (over and pending.made.arrived() and (pending.sampled is None or pending.sampled.arrived())):
                going.append(pending)
                continue
            samples = [0, 0] if pending.sampled is None else [1, int(pending.sampled.tensors[0])]
            made = pending.made.tensors[0].tolist()
            board.put([0, pending.number, pending.step, pending.conditions, *samples, *made])
            self._mine.append(pending.number)
            self.written += 1
        self._begun = going

    def _compare(self, board: RankBoard, judge: RankJudge, ranks: Sequence[int]) -> None:
        """Compares the rows of all present ``ranks``, forward by forward."""
        self._look_who_is_here(board, ranks)
        others = [rank for rank in ranks if rank != board.group.rank]
        while others and self._mine:
            number = self._mine[0]
            rows = {rank: row for rank in ranks if (row := board.row(rank, number)) is not None}
            late = [rank for rank in others if rank not in rows]
            if late and len(self._mine) <= PATIENCE:
                return
            self._mine.popleft()
            self._count_late(late, others)
            if board.group.rank in rows and len(rows) > 1:
                self._judge_rows(board, judge, rows)

    def _judge_rows(self, board: RankBoard, judge: RankJudge, rows: RankRows) -> None:
        about = {rank: board.about(rank) or {} for rank in rows}
        alike = {rank: str(said["kv"]) for rank, said in about.items() if said.get("kv")}
        found = judge.judge(rows, alike)
        if judge.rounds and "rounding" not in self._told:
            self._told.add("rounding")
            reason = "KV that several ranks hold is not bit-equal there: it is not compared in such forwards"
            self._switch.tell(Event("ranks_rounding", "info", {"reason": reason}))
        if judge.compared == BLIND and not judge.established:
            self._blind(f"{BLIND} forwards were compared, and ranks agreed on none: they may not be numbered alike", [])
        if not found:
            self._episodes.clear()
            return
        self.differing += 1
        # What differs once goes on to differ, in other ways: one finding until they agree again.
        if found[0].odd not in self._episodes and self._state is not None:
            self._episodes.add(found[0].odd)
            self.report([finding(found, rows[board.group.rank], about, self._state.sources.judged)])

    def _look_who_is_here(self, board: RankBoard, ranks: Sequence[int]) -> None:
        """Events, once each: all ranks are present, or some are absent."""
        absent = [rank for rank in range(board.group.size) if rank not in ranks]
        if not absent and "all" not in self._told:
            self._told.add("all")
            board.unlink()
            fields: dict[str, object] = {"ranks": list(ranks), "interval": self._interval}
            self._switch.tell(Event("ranks_compared", "info", fields))
            keys = {said.get("keys") for rank in ranks if (said := board.about(rank)) is not None}
            if board.group.kv is not None and len(keys) > 1:
                reason = (
                    "KV that several ranks hold is not compared: their fingerprints have other keys, since they were "
                    "not begun by one process through multiprocessing; with CANARY_KEY_FILE or CANARY_KEYS=public they "
                    "have the same"
                )
                self._blind(reason, [])
        elif absent and self.written >= BLIND:
            reason = f"of {board.group.size} ranks these have not come: they run on other machines, without Canary, or "
            self._blind(f"{reason}with other settings, or have ended", absent)

    def _count_late(self, late: Sequence[int], others: Sequence[int]) -> None:
        for rank in others:
            missing = self._missing[rank] = self._missing.get(rank, 0) + 1 if rank in late else 0
            if missing == BLIND:
                self._blind(f"{BLIND} forwards in a row were not written by rank {rank}", [rank])
        self.missed += len(late)

    def _blind(self, reason: str, ranks: Sequence[int]) -> None:
        """Something is not compared: told once for each ``reason``."""
        if reason not in self._told:
            self._told.add(reason)
            self._switch.tell(Event("ranks_blind", "warning", {"reason": reason, "ranks": list(ranks)}))
