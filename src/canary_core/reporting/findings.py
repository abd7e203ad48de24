"""`Findings`: turns ring rows into `Violation`s and hands each to the hooks once."""

from collections import OrderedDict
from collections.abc import Sequence

import pluggy

from canary_core import plugins
from canary_core.events import Event
from canary_core.ops.state import RegionState
from canary_core.records import STATES, Kind, Phase, Row, State
from canary_core.violation import Violation
from canary_core.writers import Writers

REMEMBERED = 65536
"""Findings remembered so that one that every forward finds again is reported once."""


class Findings:
    """Decodes, drops repeats, lets plugins dismiss, and delivers. ``delivered`` counts by kind what was reported;
    ``repeated`` and ``dismissed`` count what was not."""

    def __init__(self, states: Sequence[RegionState], hooks: pluggy.PluginManager, writers: Writers, rank: int) -> None:
        self._states = states
        self._hooks = hooks
        self._writers = writers
        self._rank = rank
        self._known: OrderedDict[tuple[object, ...], None] = OrderedDict()
        self.delivered: dict[Kind, int] = dict.fromkeys(Kind, 0)
        self.repeated = 0
        self.dismissed = 0

    def deliver(self, rows: Sequence[Sequence[int]]) -> list[Violation]:
        """The findings of ``rows`` (see `Row`) that are new and stand, each after its hooks were called."""
        return self.take([self.decode(row) for row in rows])

    def take(self, violations: Sequence[Violation]) -> list[Violation]:
        """As `deliver`, for findings that are decoded already."""
        stand = []
        for violation in violations:
            if self._repeats(violation):
                self.repeated += 1
                continue
            reason = self._vet(violation)
            if reason is not None:
                self.dismissed += 1
                plugins.emit(Event("dismissed", "debug", {"reason": reason, **violation.fields()}), self._hooks)
                continue
            self.delivered[violation.kind] += 1
            stand.append(violation)
            self._tell(violation)
        return stand

    def _vet(self, violation: Violation) -> str | None:
        """Why a plugin dismisses the finding. A plugin that fails to answer doesn't."""
        try:
            reason: str | None = self._hooks.hook.canary_dismiss(violation=violation)
        except Exception as error:
            self._complain("canary_dismiss", error)
            return None
        return reason

    def _tell(self, violation: Violation) -> None:
        """Built-in reporting hears of it first, so that no other listener that fails can silence it."""
        try:
            self._hooks.hook.canary_violation(violation=violation)
        except Exception as error:
            self._complain("canary_violation", error)

    def _complain(self, where: str, error: Exception) -> None:
        plugins.emit(Event("reporting_failed", "error", {"where": where, "error": repr(error)}), self._hooks)

    def decode(self, row: Sequence[int]) -> Violation:
        """One ring row as a `Violation`."""
        state = self._states[row[Row.REGION]]
        kind = Kind(row[Row.KIND])
        source = state.sources[row[Row.SOURCE]] if row[Row.SOURCE] >= 0 else None
        page_size = state.region.sources[0].page_size
        word = row[Row.STORED_POSITION]
        stored = word >= 0
        freed = row[Row.FREED] & 0xFFFFFFFF if row[Row.FREED] != -1 else 0
        return Violation(
            kind=kind,
            region=state.region.name,
            phase=Phase(row[Row.STEP] % 8),
            step=row[Row.STEP] // 8,
            slot=row[Row.SLOT],
            page=row[Row.SLOT] // page_size,
            source=source.name if source else None,
            layer=source.layer if source else None,
            half=source.half if source else None,
            position=_known(row[Row.POSITION]),
            token=_known(row[Row.TOKEN]),
            stored_state=State.of(word) if stored else None,
            stored_position=word // STATES if stored else None,
            stored_token=row[Row.STORED_TOKEN] if stored else None,
            stored_value=row[Row.STORED_VALUE] if stored or kind is Kind.WRITE_SLOT else None,
            found_value=row[Row.FOUND_VALUE] if kind in (Kind.PREFIX, Kind.BYTES, Kind.LOST_WRITE) else None,
            request=self._writers.name(row[Row.WRITER]),
            stored_request=self._writers.name(row[Row.STORED_WRITER]),
            step_written=_known(row[Row.STEP_WRITTEN]),
            step_freed=freed or None,
            freed_by=self._writers.name(row[Row.FREED] >> 32) if freed else None,
            rank=self._rank,
        )

    def _repeats(self, v: Violation) -> bool:
        """Whether this was reported before. A fault that persists is found by every check; one that comes back after
        the slot was written again, or with other bytes, is new."""
        key: tuple[object, ...] = (v.kind, v.region, v.slot, v.source, v.step_written, v.found_value)
        if v.kind is Kind.CACHE_STRUCTURE:
            key = (*key, v.rule, v.node, v.detail)
        elif v.kind is not Kind.BYTES:
            key = (*key, v.position, v.request)
        if key in self._known:
            self._known.move_to_end(key)
            return True
        self._known[key] = None
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return False


def _known(value: int) -> int | None:
    return None if value < 0 else value
