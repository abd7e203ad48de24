"""`DraftForwards`: the layers of a draft model that has the served model's tables, and a forward of its own after each
of the served model's.

A drafter first computes the positions that the served model has just computed, then guesses from the last accepted one
on. It may leave out what was rejected, and writes guesses behind what it was given. So of each of its runs the slots
that it may write are forgotten before, and afterwards the ones that the served model has, too, are recorded: whatever
is read of them later was written in that run. Guesses stay unknown until they are computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from canary_core import BatchView, Canary, Overlap, SlotTable


class DraftForwards:
    """``regions``: those of the draft model's layers, whose tables are among those of the served model's forwards, with
    the slots that are written. ``steps``: how many tokens are drafted at most."""

    def __init__(self, canary: Canary, regions: Sequence[str], steps: int) -> None:
        self._canary = canary
        self._regions = regions
        self._ahead = torch.arange(steps + 1, device=canary.device)
        self._view: BatchView | None = None

    def split(self, view: BatchView) -> BatchView:
        """``view`` of the served model's forward without the tables of the draft model, whose `run` has them."""
        if not self._regions:
            return view
        if self._view is not None:
            # The drafter did not run: its layers have nothing of what the served model computed.
            self._forget(self._view, None)
        own = {name: view.tables[name] for name in self._regions}
        self._view = replace(view, tables=own, expected_tokens=None)
        return replace(view, tables={name: table for name, table in view.tables.items() if name not in own})

    def run(self, original: Callable[[], Any]) -> Any:
        """Runs the drafter. Raises `ViolationError` in raise mode."""
        view, self._view = self._view, None
        if view is None or not self._canary.enabled:
            return original()
        with self._canary.guard("draft_forwards"):
            self._forget(view, self._ahead)
        tables = {name: replace(table, write_slots=None) for name, table in view.tables.items()}
        view = replace(view, tables=tables)
        return self._canary.step.run(original, lambda: view, overlap=Overlap.CHECK)

    def _forget(self, view: BatchView, ahead: Tensor | None) -> None:
        for name, table in view.tables.items():
            if ahead is None:
                self._canary.slots.forget(name, None)
            elif table.write_slots is not None:
                slots = torch.cat([table.write_slots.long(), _behind(view, table, ahead)])
                self._canary.slots.forget(name, slots)


def _behind(view: BatchView, table: SlotTable, ahead: Tensor) -> Tensor:
    """The slots of the positions behind those of ``view``, one for each of ``ahead``; 0 beyond the table."""
    positions = (view.prefix_lens + view.new_lens).long()[:, None] + ahead
    entry = positions // table.page_size
    held = table.entries.gather(1, entry.clamp(max=table.width - 1)).long()
    return (held * table.page_size + positions % table.page_size).where(entry < table.width, 0).flatten()
