"""`InTime`: on a GPU, verdicts that are there when the engine has its tokens."""

import torch

from canary_core.guard.reporting.findings import Reporter
from canary_core.records import Counter
from canary_core.runtime.workspace import Workspace

MOST_AHEAD = 4
"""Forwards since the last `InTime.due`, after which the tokens of some count as given out."""


class InTime:
    """The number of rows in the violation ring, copied to one word of pinned host memory after each forward on its
    stream. Whoever waits for later work of that stream, as an engine does for sampled tokens, has waited for the word,
    which only grows. So a look at the word tells whether anything was found, and nobody waits where nothing was."""

    def __init__(self, workspace: Workspace, findings: Reporter) -> None:
        self._workspace = workspace
        self._findings = findings
        self._rows = workspace.shared.counters[Counter.ROWS : Counter.ROWS + 1]
        self._word = torch.zeros_like(self._rows, device="cpu", pin_memory=True)
        self._ahead = self._handed = 0

    def sent(self) -> None:
        """After a forward, on its stream; never captured, never waits."""
        self._word.copy_(self._rows, non_blocking=True)
        self._ahead += 1
        if self._ahead > MOST_AHEAD:
            self._findings.in_time = False

    def handed(self) -> None:
        """All that was read so far was handed to the plugins."""
        self._handed = self._findings.read_back.seen

    def due(self) -> int | None:
        """The engine has waited for the tokens of a forward. Number of rows by then, None if all were handed to the
        plugins; then nobody has waited for anything."""
        self._ahead, self._findings.in_time = 0, True
        number = int(self._word)
        if number <= self._handed:
            return None
        if self._workspace.side is not None:
            # Its kernels may still write some of the rows.
            self._workspace.side.wait()
        return number
