"""`Witness`: tokens that the engine itself says it has computed, beside those that Canary has recorded."""

import time
import weakref
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock

from canary_core.events import Event

LOOK_S = 5.0
"""Least time between two looks that are kept."""

SETTLED_S = 20.0
"""Age of a look from which on its tokens must be recorded: engines tell of forwards some steps early or late."""

LEAST_TOKENS, LEAST_SHARE = 16, 0.001
"""What is missing is told from so many tokens on, and from so large a share of what was computed since the last time.
At the end, when all is counted, any token is told."""


@dataclass(frozen=True, slots=True)
class Look:
    """What was known at one moment: seconds of `time.monotonic`, tokens, how many reads of the counters had begun and
    arrived, and how many forwards Canary had been called for."""

    when: float
    computed: int
    explained: int
    reads: int
    calls: int


class Witness:
    """Counts the tokens that an engine's own books say it has computed, and compares them with those whose KV Canary
    has recorded: the hooks that guard an engine can't hide that they are not called. One for each model that an engine
    runs; Canaries that follow each other, or share a model, may share it.

    The engine's side calls `computed`, with a figure that does not come from the hooks that guard: a scheduler's
    output, a counter of the engine, the length of an answer. A token in one forward counts once, drafts too, padding
    never. Without a call nothing is compared. All of it may be called from any thread, and does nothing on a device.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._computed = 0
        self._guarded = 0
        self._explained: Tally[str] = Tally()
        self._reads = 0
        self._reported = self._base = (0, 0)
        self._reporter: weakref.ref[object] | None = None
        self._looks: deque[Look] = deque(maxlen=64)
        self._told_missing = self._told_computed = 0
        self._passing = False
        self.why: Callable[[], str | None] | None = None
        """Gives why forwards pass unguarded now, as for `explain`; None where they do not."""
        self.calls: Callable[[], int] | None = None
        """Gives how often Canary was called for a forward, guarded or not; None where only reads say that it goes
        on."""

    def computed(self, tokens: int) -> None:
        """The engine says that forwards have computed ``tokens`` more."""
        why = None if self.why is None else self.why()
        with self._lock:
            self._computed += tokens
            if why is not None:
                self._explained[why] += tokens
                self._passing = True

    def explain(self, reason: str, tokens: int) -> None:
        """So many of them are not guarded for a reason that is known and was told, or write no KV. ``reason``: a short
        name that stays the same, such as ``paused``."""
        if tokens:
            with self._lock:
                self._explained[reason] += tokens

    def recorded(self, tokens: int) -> None:
        """The counters of a device say that ``tokens`` more were recorded."""
        with self._lock:
            self._guarded += tokens
            self._reads += 1

    @property
    def computed_tokens(self) -> int:
        """By the engine's books."""
        return self._computed

    @property
    def guarded_tokens(self) -> int:
        """As of the last read of the counters."""
        return self._guarded

    @property
    def explained(self) -> Mapping[str, int]:
        """Tokens that are not guarded, by reason."""
        with self._lock:
            return dict(self._explained)

    @property
    def missing(self) -> int:
        """Tokens that were computed, and of which nothing is known. Above 0 for a moment while forwards run."""
        with self._lock:
            return self._missing(self._computed, self._explained.total())

    @property
    def ratio(self) -> float | None:
        """Guarded tokens among those computed, 1 at most; None as long as the engine has told of none."""
        return min(self._guarded / self._computed, 1.0) if self._computed else None

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
        """Computed and guarded tokens as ``of`` reports them, one of those that share this: the first one reports those
        of all, until it is gone; the next one those that came since, so that their sum is right."""
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
        """Compares what was computed some time ago with what is recorded now; gives an ``unguarded_tokens`` event where
        more is missing than the last one said. To be called every few seconds, from one thread."""
        now = time.monotonic() if now is None else now
        with self._lock:
            if self._passing:
                # Whether the forwards around a pause were guarded depends on how far ahead the engine tells of them.
                self._passing = False
                self._looks.clear()
                missing = self._missing(self._computed, self._explained.total())
                if missing:
                    self._explained["around_a_pause"] += missing
                return None
            calls = self.calls() if self.calls is not None else -1
            newest = Look(now, self._computed, self._explained.total(), self._reads, calls)
            settled = [look for look in self._looks if now - look.when >= SETTLED_S]
            if not self._looks or now - self._looks[-1].when >= LOOK_S:
                self._looks.append(newest)
            if not settled:
                return None
            old = settled[-1]
            missing = self._missing(old.computed, old.explained)
            if not (self._reads >= old.reads + 2 or _passed_by(self._looks, old, newest)):
                # What an engine computed last before it idles is read with its next forward.
                return None
            return self._told(missing, LEAST_TOKENS, LEAST_SHARE)

    def settle(self) -> Event | None:
        """As `look`, when all that was computed is counted: after a drain, at the end."""
        with self._lock:
            return self._told(self._missing(self._computed, self._explained.total()), 1, 0.0)

    def sentence(self, missing: int) -> str:
        """Says that ``missing`` tokens are not guarded."""
        known = ", ".join(f"{number} more {reason}" for reason, number in self._explained.items())
        return (
            f"{missing} of {self._computed} tokens that the engine says it computed were never seen"
            f"{f' ({known}: known)' if known else ''}; a forward runs past Canary's hooks: see hooks_left_out, "
            "untested_engine and unguarded_forward events, and whether a model or runner of your own replaces a "
            "function that is hooked"
        )

    def _missing(self, computed: int, explained: int) -> int:
        return max(computed - explained - self._guarded, 0)

    def _told(self, missing: int, least: int, share: float) -> Event | None:
        more, computed = missing - self._told_missing, self._computed - self._told_computed
        if more < max(least, share * computed):
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


def _passed_by(looks: "deque[Look]", old: Look, newest: Look) -> bool:
    """Whether forwards run, seen in two looks at least, and Canary is not called for any."""
    since = [look for look in looks if look.when > old.when]
    moved = sum(one.computed < two.computed for one, two in zip([old, *since], [*since, newest], strict=True))
    return moved >= 2 and newest.calls == old.calls and newest.reads == old.reads
