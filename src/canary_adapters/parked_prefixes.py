"""`ParkedPrefixes`: ended requests, and the KV left by each in the engine's prefix cache."""

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from canary_core import Event, Touch, emit

GroupBlocks = Sequence[Sequence[int] | Tensor]
"""A request's blocks, by group and by position; 0 and less for none. A tensor has slots, as the engine's tables number
these; of recurrent states the one slot, or none where the states are not those behind the tokens in question."""

PARKED = "canary-parked-"
"""Before the name of a request: the prefix left by the request."""
ALL_PARKED = "canary-all-parked"
"""The prefixes of all remembered requests."""

UNREMEMBERED = "that takes CANARY_CONTROL=write or CANARY_RECOMPUTE when the engine starts"
"""Why no parked prefix is known: each costs the host time when its request ends."""

LOST_ADAPTER = "its adapter is not loaded just now, or about to be replaced: an engine can end where it loads none"
"""Reason against a second computation of a prefix computed with an adapter."""

REMEMBERED = 2
"""Remembered tokens of ended requests for each token of the prefix cache: prefixes are shared."""

PROOF_SHARE = 0.01
"""Most of the pool that the proofs of an idle engine take from the prefix cache: all use the same part, one after the
other, until requests of users take it."""

ENTRY_TOKENS = 64
"""Share of the bound for one request, beside its tokens."""

_NUMBERS = itertools.count(1)


@dataclass(slots=True, eq=False, kw_only=True)
class ParkedPrefix(ABC):
    """A prefix left in the cache by a request. content: token ids of whole blocks. prompt: how many tokens the request
    began with; all others were decoded. why: the reason against a second computation, None for none. number: an own
    one. proven: a larger number after each proof, 0 before the first. alias: the client's name for the request, where
    the engine has another."""

    name: str
    alias: str | None = None
    content: Sequence[int] = field(default=(), repr=False)
    prompt: int = 0
    touches: tuple[Touch, ...] = ()
    why: str | None = None
    number: int = field(default_factory=lambda: next(_NUMBERS))
    proven: int = 0

    @abstractmethod
    def left(self) -> int:
        """Number of tokens from the first on in blocks of unchanged content, by the engine's cache."""

    @abstractmethod
    def blocks(self) -> GroupBlocks:
        """Blocks by group and position; 0 for a block with another content by now, or none."""

    @property
    def cost(self) -> int:
        """In tokens, of the bound."""
        return len(self.content) + ENTRY_TOKENS


class ParkedPrefixes:
    """Prefixes of the last ended requests: at most ``most_tokens`` tokens, with `ENTRY_TOKENS` more for each request.
    The oldest is forgotten first. No block is kept from eviction or another use.

    The first request forgotten for want of room is a ``parked_full`` event, and each new reason against a second
    computation a ``parked_left_out`` event.
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self.tokens = 0
        self._prefixes: dict[str, ParkedPrefix] = {}
        self._aliases: dict[str, str] = {}
        self._proofs = itertools.count(1)
        self._reasons: set[str] = set()
        self._full = False
        self._counts: Counter[str] = Counter()

    @classmethod
    def of_cache(cls, tokens: int) -> "ParkedPrefixes":
        """For a prefix cache with room for so many tokens: `REMEMBERED` times as many."""
        return cls(REMEMBERED * tokens)

    def add(self, prefix: ParkedPrefix) -> None:
        """A request has ended. An older one of the same name is forgotten. Does nothing where no content was left, and
        no reason is to be told."""
        if prefix.why is None and not prefix.content:
            return
        self._drop(prefix.name)
        if prefix.why is not None:
            self._counts["parked_left_out"] += 1
            if prefix.why not in self._reasons:
                self._reasons.add(prefix.why)
                emit(Event("parked_left_out", "info", {"request": prefix.name, "reason": prefix.why}))
        while self._prefixes and self.tokens + prefix.cost > self.most_tokens:
            self._drop(next(iter(self._prefixes)))
            self._forgot()
        if prefix.cost > self.most_tokens:
            self._forgot()
            return
        self._prefixes[prefix.name] = prefix
        if prefix.alias is not None:
            self._aliases[prefix.alias] = prefix.name
        self.tokens += prefix.cost
        self._counts["parked_remembered"] += 1

    def get(self, name: str) -> ParkedPrefix | None:
        """The prefix of a request by the engine's name, or the client's; None for an unknown request."""
        return self._prefixes.get(name) or self._prefixes.get(self._aliases.get(name, ""))

    def names(self) -> list[str]:
        """Of all requests, oldest first."""
        return list(self._prefixes)

    def by_proof(self) -> list[ParkedPrefix]:
        """Prefixes to compute again, the least recently proven first."""
        able = [prefix for prefix in self._prefixes.values() if prefix.why is None]
        return sorted(able, key=lambda prefix: (prefix.proven, prefix.number))

    def proven(self, prefix: ParkedPrefix) -> None:
        """``prefix`` was computed again just now."""
        prefix.proven = next(self._proofs)

    def evicted(self, number: int) -> None:
        """So many blocks or slots left the prefix cache, for a proof in an idle engine."""
        self._counts["parked_evicted"] += number

    def counted(self) -> dict[str, int]:
        """By counter of `Canary.stats`, since the last call."""
        if not self._counts:
            return {}
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    def _drop(self, name: str) -> None:
        prefix = self._prefixes.pop(name, None)
        if prefix is not None:
            self.tokens -= prefix.cost
            if prefix.alias is not None and self._aliases.get(prefix.alias) == name:
                del self._aliases[prefix.alias]

    def _forgot(self) -> None:
        self._counts["parked_forgotten"] += 1
        if not self._full:
            self._full = True
            emit(Event("parked_full", "info", {"most_tokens": self.most_tokens, "requests": len(self._prefixes)}))
