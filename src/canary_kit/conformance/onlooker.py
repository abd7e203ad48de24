"""`Onlooker`: a plugin that keeps the content of an adapter's views."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from canary_core.batch import BatchView
from canary_core.guard.canary import Canary
from canary_core.plugins.hookspecs import hookimpl

OnView = Callable[[Canary, BatchView], None]


@dataclass(frozen=True, slots=True)
class SeenRow:
    """One request in a view: the tokens from position ``prefix`` on are computed. ``expected``: the request's own
    tokens by position, -1 where unknown to the view."""

    forward: int
    request: str | None
    prefix: int
    tokens: tuple[int, ...]
    expected: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Onlooker:
    """Hears of each Canary that is built, and of each view. ``before`` and ``after``: called with both, right before
    the check and before the record."""

    before: OnView | None = None
    after: OnView | None = None
    canaries: list[Canary] = field(default_factory=list)
    rows: list[SeenRow] = field(default_factory=list)
    """Rows with new tokens of all views, in order."""
    forwards: int = 0
    """Checked views."""
    tables: int = 0
    """Tables of regions in these views."""
    pages: set[int] = field(default_factory=set)
    """How many slots a page of these tables has."""
    stored: int = 0
    """Forwards with recorded writes."""
    error: Exception | None = None
    """First exception of ``before`` or ``after``; neither is called any more."""
    open_rows: dict[int, range] = field(default_factory=dict)
    """By id of a Canary: the range of ``rows`` of its last checked forward."""

    @hookimpl
    def canary_attached(self, canary: Canary) -> None:
        """Keeps the Canary."""
        self.canaries.append(canary)

    @hookimpl(trylast=True)
    def canary_pre_forward(self, canary: Canary, batch: BatchView) -> None:
        """Keeps the content of the view."""
        self.forwards += 1
        self.tables += len(batch.tables)
        self.pages.update(table.page_size for table in batch.tables.values())
        tokens: list[int] = batch.token_ids.tolist()
        expected = batch.expected_tokens.tolist() if batch.expected_tokens is not None else [()] * batch.rows
        lengths = zip(
            batch.prefix_lens.tolist(), batch.new_lens.tolist(), batch.writers.tolist(), expected, strict=True
        )
        begin = len(self.rows)
        first = 0
        for prefix, new, writer, own in lengths:
            if new > 0:
                row = SeenRow(
                    self.forwards, canary.writers.name(writer), prefix, tuple(tokens[first : first + new]), tuple(own)
                )
                self.rows.append(row)
                first += new
        self.open_rows[id(canary)] = range(begin, len(self.rows))
        self._call(self.before, canary, batch)

    @hookimpl(tryfirst=True)
    def canary_post_forward(self, canary: Canary, batch: BatchView) -> None:
        """Counts the forward. Keeps the tokens used by it: they may have been filled in by the forward itself, from the
        device memory of an earlier one."""
        self.stored += 1
        tokens: list[int] = batch.token_ids.tolist()
        first = 0
        for place in self.open_rows.pop(id(canary), range(0)):
            end = first + len(self.rows[place].tokens)
            self.rows[place] = replace(self.rows[place], tokens=tuple(tokens[first:end]))
            first = end
        self._call(self.after, canary, batch)

    def _call(self, watch: OnView | None, canary: Canary, batch: BatchView) -> None:
        if watch is None or self.error is not None:
            return
        try:
            watch(canary, batch)
        except Exception as error:
            # Canary would take it for one of its own, and go off.
            self.error = error
