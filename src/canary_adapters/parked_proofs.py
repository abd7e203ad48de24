"""`ParkedProofs`: second computations of prefixes left by ended requests in the engine's prefix cache."""

from collections.abc import Callable

from canary_adapters.internal_requests import LEAST_TOKENS, Internal, InternalRequests, RecomputePair
from canary_adapters.parked_prefixes import ALL_PARKED, PARKED, ParkedPrefix

UNKNOWN_PREFIX = (
    "nothing is remembered that it left in the prefix cache: it still runs, never did, left no whole block there, or "
    "too many requests have ended since"
)
NOT_REMEMBERED = "what requests leave in the prefix cache is not remembered here: {why}; verify a request while it runs"

NO_ROOM = "parked_no_room"
"""Counter of looks in which a prefix was passed over for want of room."""

REST_S = 0.1
"""Least time between two parked prefixes computed again by an idle engine without being asked for."""


class ParkedProofs:
    """Prefixes of ``engine`` that are asked for, and those that an idle engine proves by itself.

    clock: seconds of the host.
    """

    def __init__(self, engine: InternalRequests, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._rest_until = 0.0
        self._idle_since: float | None = None

    def listed(self) -> RecomputePair:
        """The answer to `ALL_PARKED`."""
        known = self._engine.parked
        if isinstance(known, str):
            return RecomputePair(ALL_PARKED, why=NOT_REMEMBERED.format(why=known), asked=True)
        return RecomputePair(ALL_PARKED, asked=True, names=[f"{PARKED}{name}" for name in known.names()])

    def find(self, request: str) -> ParkedPrefix | str | None:
        """A prefix, or the reason against a second computation; None for the name of a running request."""
        if not request.startswith(PARKED):
            return None
        known = self._engine.parked
        if isinstance(known, str):
            return NOT_REMEMBERED.format(why=known)
        prefix = known.get(request.removeprefix(PARKED))
        return UNKNOWN_PREFIX if prefix is None else prefix.why or self._engine.hindered(prefix) or prefix

    def waits(self) -> float | None:
        """Seconds until an idle engine may prove the next one; None where it remembers none."""
        known = self._engine.parked
        return None if isinstance(known, str) or not known.names() else max(self._rest_until - self._clock(), 0.0)

    def begin(self) -> tuple[ParkedPrefix | None, str | None]:
        """The least recently proven one with enough left, no `InternalRequests.hindered`, and `InternalRequests.spare`
        room; and the counter of what others lacked, None for nothing. An adapter counts only where there is none."""
        known, lacks = self._engine.parked, None
        self._rest_until = self._clock() + REST_S
        for prefix in () if isinstance(known, str) else known.by_proof():
            if prefix.left() >= LEAST_TOKENS:
                if self._engine.hindered(prefix) is not None:
                    lacks = lacks or "parked_no_adapter"
                elif self._engine.spare(f"{PARKED}{prefix.name}"):
                    self._idle_since = self._clock()
                    return prefix, NO_ROOM if lacks == NO_ROOM else None
                else:
                    lacks = NO_ROOM
        return None, lacks

    def rest(self, share: float) -> None:
        """After a proof in an idle engine, as long as the share says; time of other batches does not count."""
        if self._idle_since is not None:
            spent = self._clock() - self._idle_since
            self._rest_until = self._clock() + max(REST_S, spent * (1 / share - 1) if share else 0.0)
            self._idle_since = None

    def pair(self, one: Internal, parked: ParkedPrefix) -> RecomputePair:
        """Of the tokens left after the making of the batch: no earlier forward has written there."""
        if not isinstance(self._engine.parked, str):
            self._engine.parked.proven(parked)
        tokens = min(one.target.tokens, parked.left())
        decoded = max(0, tokens - parked.prompt)
        return RecomputePair(
            one.target.name, one.name, tokens, decoded, parked.blocks(), self._engine.blocks(one.name), parked.touches,
            asked=one.asked, parked=len(parked.content), content=parked.content[:tokens],
        )  # fmt: skip


def too_little(parked: ParkedPrefix, request: str, again: str = "", asked: bool = False) -> RecomputePair:
    """The message about a prefix of which too little is left to compare."""
    return RecomputePair(request, again, parked.left(), parked=len(parked.content), asked=asked)
