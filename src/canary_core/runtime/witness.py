"""`Witness`: tokens computed by the engine's own account, beside the tokens recorded by Canary."""

import time
import weakref
from collections import Counter as Tally
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock

from canary_core.events import Event

LOOK_S = 5.0
"""Least time between two compared looks."""

SETTLED_READS = 4
"""Reads of the counters after which earlier tokens must be counted: engines report a forward some steps early or late,
and a record may run beside the next forward."""

PASSED_LOOKS = 3
"""Looks with tokens computed but no call of Canary, after which the engine counts as unguarded."""

LEAST_TOKENS, LEAST_SHARE = 16, 0.001
"""Least number of missing tokens, and least share of the tokens computed since the last report, for a report. At the
end, when all is counted, the summary reports any token."""


@dataclass(frozen=True, slots=True)
class Look:
    """Figures of one moment: seconds of `time.monotonic`, computed tokens, reads of the counters arrived, and forwards
    Canary was called for."""

    when: float
    computed: int
    reads: int
    calls: int


class Witness:
    """Counts the tokens computed by the engine's own books, and compares them with the tokens whose KV Canary has
    recorded: so the hooks that guard an engine can't hide that they are not called. One for each model of an engine;
    Canaries that follow each other, or share a model, may share it.

    The engine's side calls `computed`, or lets `follow` read a counter of the engine's, with a figure independent of
    the guarding hooks: a scheduler's output, the length of an answer. A token in one forward counts once, drafts too,
    padding never. Without a figure nothing is compared. All methods may be called from any thread, and do nothing on a
    device.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._computed = 0
        self._guarded = 0
        self._explained: Tally[str] = Tally()
        self._reads = 0
        self._reported = self._base = (0, 0)
        self._reporter: weakref.ref[object] | None = None
        self._settling: Look | None = None
        self._last: Look | None = None
        self._passed = 0
        self._shortfall = 0
        self._told_missing = self._told_computed = 0
        self._passing = self._passed_before = False
        self._followed: list[tuple[Callable[[], int], int]] = []
        self.why: Callable[[], str | None] | None = None
        """Returns why forwards pass unguarded now, as for `explain`; None where they do not."""
        self.calls: Callable[[], int] | None = None
        """Returns the number of Canary's calls for a forward, guarded or not; None where only reads of the counters
        show progress."""

    def computed(self, tokens: int) -> None:
        """Forwards have computed ``tokens`` more by the engine's account."""
        why = None if self.why is None else self.why()
        with self._lock:
            self._computed += tokens
            if why is not None:
                self._explained[why] += tokens
                self._passing = True

    def follow(self, read: Callable[[], int]) -> None:
        """Counts the growth of ``read()`` from now on, as if reported by `computed`: a number kept by the engine
        itself, of tokens computed so far, never falling. Called every few seconds, from any thread."""
        with self._lock:
            self._followed.append((read, read()))

    def explain(self, reason: str, tokens: int) -> None:
        """So many tokens are unguarded for a known and reported reason, or write no KV. ``reason``: a short, stable
        name, such as ``paused``."""
        if tokens:
            with self._lock:
                self._explained[reason] += tokens

    def dropped(self, tokens: int) -> None:
        """So many tokens have left no KV: a forward without a cache, or tokens passed at once by a window."""
        self.computed(-tokens)

    def recorded(self, tokens: int) -> None:
        """A read of the counters has arrived: ``tokens`` more were recorded."""
        with self._lock:
            self._guarded += tokens
            self._reads += 1
            if self._settling is not None and self._reads >= self._settling.reads + SETTLED_READS:
                self._shortfall = self._missing(self._settling.computed)
                self._settling = None

    @property
    def computed_tokens(self) -> int:
        """By the engine's books."""
        self._poll()
        return self._computed

    @property
    def guarded_tokens(self) -> int:
        """As of the last read of the counters."""
        return self._guarded

    @property
    def explained(self) -> Mapping[str, int]:
        """Unguarded tokens, by reason."""
        with self._lock:
            return dict(self._explained)

    @property
    def missing(self) -> int:
        """Computed tokens without any trace. Above 0 for a moment while forwards run."""
        self._poll()
        with self._lock:
            return self._missing(self._computed)

    @property
    def ratio(self) -> float | None:
        """Guarded tokens among the computed ones, 1 at most; None until the engine reports any."""
        computed = self.computed_tokens
        return min(self._guarded / computed, 1.0) if computed else None

    def stats(self) -> dict[str, float]:
        """``computed_tokens``, ``guarded_tokens``, ``guarded_ratio``; empty as long as the engine has told of none."""
        ratio = self.ratio
        if ratio is None:
            return {}
        explained = {f"unguarded_{reason}_tokens": number for reason, number in self.explained.items()}
        return {
            "computed_tokens": self._computed,
            "guarded_tokens": self._guarded,
            "guarded_ratio": round(ratio, 6),
            **explained,
        }

    def share(self, of: object) -> tuple[int, int]:
        """Computed and guarded tokens for the report of ``of``, one of the sharers: the first one reports the tokens of
        all, until it is gone; the next one those since, so that the sum is right."""
        self._poll()
        with self._lock:
            if self._reporter is None or self._reporter() is None:
                self._reporter, self._base = weakref.ref(of), self._reported
            if self._reporter() is not of:
                return 0, 0
            self._reported = (self._computed, self._guarded)
            return self._computed - self._base[0], self._guarded - self._base[1]

    def hand_over(self, of: object) -> None:
        """``of`` has reported for the last time."""
        with self._lock:
            if self._reporter is not None and self._reporter() is of:
                self._reporter = None

    def look(self, now: float | None = None) -> Event | None:
        """Gives an ``unguarded_tokens`` event where more is missing than the last one said. To be called every few
        seconds, from one thread; ``now``: of `time.monotonic`."""
        now = time.monotonic() if now is None else now
        self._poll()
        with self._lock:
            if self._passing or self._passed_before:
                # Whether the forwards around a pause were guarded depends on how far ahead the engine tells of them.
                self._passing, self._passed_before = False, self._passing
                missing = self._missing(self._computed)
                if missing:
                    self._explained["around_a_pause"] += missing
                self._settling = self._last = None
                return None
            last = self._last
            if last is None or now - last.when >= LOOK_S:
                calls = self.calls() if self.calls is not None else -1
                self._last = newest = Look(now, self._computed, self._reads, calls)
                self._settling = self._settling or newest
                if last is None or (newest.reads, newest.calls) != (last.reads, last.calls):
                    self._passed = 0
                elif newest.computed > last.computed:
                    self._passed += 1
                    if self._passed >= PASSED_LOOKS:
                        self._shortfall = self._missing(self._computed)
            return self._told(self._shortfall)

    def settle(self) -> Event | None:
        """As `look`, once everything computed is counted, as after a drain: any missing token is reported."""
        self._poll()
        with self._lock:
            self._shortfall = self._missing(self._computed)
            return self._told(self._shortfall, at_least=1)

    def sentence(self, missing: int) -> str:
        """Sentence about ``missing`` unguarded tokens."""
        known = ", ".join(f"{number} more {reason}" for reason, number in self._explained.items())
        return (
            f"{missing} of {self._computed} tokens that the engine says it computed were never seen"
            f"{f' ({known}: known)' if known else ''}; a forward runs past Canary's hooks: see hooks_left_out, "
            "untested_engine and unguarded_forward events, and whether a model or runner of your own replaces a "
            "function that is hooked"
        )

    def _poll(self) -> None:
        """Adds the growth of followed counters."""
        for number, (read, before) in enumerate(self._followed):
            now = read()
            with self._lock:
                if self._followed[number][1] != before:
                    continue  # Another thread was faster.
                self._followed[number] = (read, max(now, before))
            if now > before:
                self.computed(now - before)

    def _missing(self, computed: int) -> int:
        return max(computed - self._explained.total() - self._guarded, 0)

    def _told(self, missing: int, at_least: int | None = None) -> Event | None:
        more, computed = missing - self._told_missing, self._computed - self._told_computed
        if more < (at_least or max(LEAST_TOKENS, LEAST_SHARE * computed)):
            return None
        self._told_missing, self._told_computed = missing, self._computed
        fields: dict[str, object] = {
            "reason": self.sentence(missing),
            "missing_tokens": missing,
            "computed_tokens": self._computed,
            "guarded_tokens": self._guarded,
            "explained": dict(self._explained),
        }
        return Event("unguarded_tokens", "warning", fields)
