"""`RankJudge`: which ranks computed something else than the others, as far as that is certain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from canary_core.watchers.ranks.digest import RankWord

AGREED = 2
"""Agreeing forwards before the first difference is told: proof of the same numbering."""

PROVEN = 16
"""Forwards with bit-equal KV, of as many new tokens each, before other KV is told; or so many of any, where one layer
alone differs."""

MOST_LENGTHS = 4096
"""Numbers of new tokens that are told apart."""

RankRows = Mapping[int, Sequence[int]]
"""Rows of one forward, by rank."""

COMPOSITION = (
    (RankWord.LENGTHS, "lengths"),
    (RankWord.POSITIONS, "positions"),
    (RankWord.TOKENS, "tokens"),
    (RankWord.SLOTS, "slots"),
)


@dataclass(frozen=True, slots=True)
class RankDifference:
    """``what`` differs: lengths, positions, tokens, slots, history, sampled, or kv, then in the sources ``columns``.
    ``odd``: the ranks in the minority, or all where there is none."""

    what: str
    odd: tuple[int, ...]
    columns: tuple[int, ...] = ()


class RankJudge:
    """Compares the rows of forwards, one after the other. ``alike``: ranks that hold the same KV, with a text for each
    set of them. ``layers``: of each source its layer, None where no layer is known.

    Rightful differences are not judged: prefix hashes, where weights were changed or content stands in the place of
    tokens, or where another part is known to each rank; KV without bit-equal earlier forwards of as many tokens, since
    the rounding of kernels and of sums over ranks depends on that number.
    """

    def __init__(self, slots: bool, layers: Sequence[int | None]) -> None:
        self._words = COMPOSITION if slots else COMPOSITION[:-1]
        self._layers = layers
        self._agreed = 0
        self._equal: dict[int, int] = {}
        self._rounding: set[int] = set()
        self._conditions = 0
        self.compared = self.compared_samples = self.compared_kv = self.unsure = 0

    @property
    def established(self) -> bool:
        """Whether enough forwards have agreed: without, nothing is told."""
        return self._agreed >= AGREED

    @property
    def rounds(self) -> bool:
        """Whether KV that several ranks hold was seen not to be bit-equal from the start."""
        return bool(self._rounding)

    def judge(self, rows: RankRows, alike: Mapping[int, str]) -> list[RankDifference]:
        """Certain differences in one forward of two ranks at least; the first is the likely cause."""
        self.compared += 1
        found = [RankDifference(what, odd(rows, word)) for word, what in self._words if differs(rows, word)]
        if not found and self._same(rows, RankWord.CONDITIONS, 0) and self._same(rows, RankWord.HISTORY_UNKNOWN):
            found += [RankDifference("history", odd(rows, RankWord.HISTORY))] if differs(rows, RankWord.HISTORY) else []
        if self._same(rows, RankWord.SAMPLES, 1):
            self.compared_samples += 1
            found += [RankDifference("sampled", odd(rows, RankWord.SAMPLED))] if differs(rows, RankWord.SAMPLED) else []
        if not found:
            self._agreed += 1
            found = self._kv(rows, alike)
        if found and not self.established:
            self.unsure += 1
            return []
        return found

    def _kv(self, rows: RankRows, alike: Mapping[int, str]) -> list[RankDifference]:
        """KV of ranks that computed the same."""
        conditions = max(row[RankWord.CONDITIONS] for row in rows.values())
        if conditions != self._conditions or not self._same(rows, RankWord.CONDITIONS):
            # Ranks need not be alike any more, as with weights made up before the real ones came.
            self._conditions = conditions
            self._equal.clear()
            self._rounding.clear()
        new = next(iter(rows.values()))[RankWord.NEW]
        sets = [[r for r in rows if alike.get(r) == text] for text in sorted(set(alike.values()))]
        sets = [ranks for ranks in sets if len(ranks) > 1]
        if (
            not (sets and self._layers)
            or new in self._rounding
            or any(rows[r][RankWord.KV_UNKNOWN] for ranks in sets for r in ranks)
        ):
            return []
        self.compared_kv += 1
        found: list[RankDifference] = []
        for ranks in sets:
            these = {rank: rows[rank] for rank in ranks}
            others = [c for c in range(len(self._layers)) if differs(these, RankWord.KV + c)]
            if others:
                found.append(RankDifference("kv", odd(these, RankWord.KV + others[0]), tuple(others)))
        if not found:
            if new in self._equal or len(self._equal) < MOST_LENGTHS:
                self._equal[new] = self._equal.get(new, 0) + 1
            return []
        proven = self._equal.get(new, 0) >= PROVEN
        if proven or (self._one_layer(found) and sum(self._equal.values()) >= PROVEN):
            return found
        self._rounding.add(new)
        self.unsure += 1
        return []

    def _one_layer(self, found: Sequence[RankDifference]) -> bool:
        """Whether one layer of several alone differs: kernels that round in another way do so in all."""
        layers = {self._layers[column] for difference in found for column in difference.columns}
        return len(layers) == 1 and None not in layers and len(set(self._layers)) > 1

    @staticmethod
    def _same(rows: RankRows, word: int, value: int | None = None) -> bool:
        values = {row[word] for row in rows.values()}
        return len(values) == 1 and value in (None, *values)


def differs(rows: RankRows, word: int) -> bool:
    """Whether not all ranks have the same word."""
    return len({row[word] for row in rows.values()}) > 1


def odd(rows: RankRows, word: int) -> tuple[int, ...]:
    """The ranks whose word is not that of more than half of all; all ranks where no word is."""
    by_value: dict[int, list[int]] = {}
    for rank, row in sorted(rows.items()):
        by_value.setdefault(row[word], []).append(rank)
    most = max(by_value.values(), key=len)
    return tuple(sorted(rank for rank in rows if rank not in most or 2 * len(most) <= len(rows)))
