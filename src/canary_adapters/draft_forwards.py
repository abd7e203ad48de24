"""`DraftForwards`: the layers of a draft model with the served model's tables, and a forward of its own after each of
the served model's.

A drafter first computes the served model's latest positions, then guesses from the last accepted one on. Rejected
tokens may be left out, and guesses are written behind the input. So before each run all slots within its reach are
forgotten, and afterwards the served model's slots among them are recorded: any later read of those is of this run.
Guesses stay unknown until computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from canary_core import BatchView, Canary, Overlap, SlotTable


class DraftForwards:
    """``regions``: the draft model's layers, with tables among those of the served model's forwards, and slots to
    write. ``steps``: most tokens drafted."""

    def __init__(self, canary: Canary, regions: Sequence[str], steps: int) -> None:
        self._canary = canary
        self._regions = regions
        self._ahead = torch.arange(steps + 1, device=canary.device)
        self._view: BatchView | None = None

    def split(self, view: BatchView) -> BatchView:
        """``view`` of the served model's forward without the tables of the draft model, used by `run`."""
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
