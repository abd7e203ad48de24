"""Interface for plugin authors: `Recomputer` has an engine compute the KV of a request a second time."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from canary_core.attention import AttentionObserver, AttentionRule
from canary_core.config import CanaryConfig
from canary_core.events import Event, Level
from canary_core.region import KVSource, Region

STARVED_LOOKS = 250
"""Looks in a row for a request of ``CANARY_RECOMPUTE`` without one to choose, though there are some, until a
``recompute_starved`` event says so."""


def may_recompute(config: CanaryConfig) -> bool:
    """Whether requests may be computed again: a share of them (``CANARY_RECOMPUTE``), or any that somebody asks for
    (``CANARY_CONTROL=write``)."""
    return bool(config.recompute) or config.control == "write"


def recompute_starved(looks: int, reason: str) -> Event | None:
    """``CANARY_RECOMPUTE`` is on, and of so many looks in a row none found a request to choose. None but for the last
    of `STARVED_LOOKS`."""
    if looks != STARVED_LOOKS:
        return None
    return Event("recompute_starved", "warning", {"looks": looks, "reason": reason})


def recompute_off(reason: str, level: Level = "warning") -> Event:
    """``CANARY_RECOMPUTE`` is on, and nothing is computed again."""
    return Event("recompute_off", level, {"reason": reason})


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """KV of one sequence outside of the cache, or in slots of its own.

    sources: named as those of the region to compare with, in any order; sources of the region that are missing here are
    not compared. slots: integer ``[n]`` on the device of the sources, the slot of each position; -1 for none.
    """

    sources: tuple[KVSource, ...]
    slots: Tensor = field(repr=False)

    @classmethod
    def within(cls, region: Region, slots: Tensor) -> "Computed":
        """In other ``slots`` of ``region`` itself, as an engine fills them that computes a request of its own."""
        return cls(tuple(region.sources), slots)


@dataclass(frozen=True, slots=True)
class Touch:
    """Positions from 0 to before ``end`` that the request itself has not computed, or not only once."""

    what: Literal["hit", "fork", "arrival", "preemption"]
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class CachedRequest:
    """A request's content of the cache between two forwards.

    tokens: the token of each position in the cache, on the host. slots: by name of a region, integer ``[n]`` on the
    pool's device: the region's slot of each position, as `Region` numbers slots; -1 where none is resident (passed by a
    window). A region whose sources are of `Role.STATE` has the rows of the request's states behind the last token, all
    named in slots. touches: none for a request that has computed all of its KV itself. parked: of a request that has
    ended, number of tokens that it left in the prefix cache, of which ``tokens`` are still there; None for a running
    request.
    """

    request: str
    tokens: Sequence[int] = field(repr=False)
    slots: Mapping[str, Tensor] = field(repr=False)
    touches: Sequence[Touch] = ()
    parked: int | None = None


@dataclass(frozen=True, slots=True)
class Outline:
    """Number of a request's tokens in the cache, and whether there is any `Touch`."""

    tokens: int
    touched: bool


class Recomputer(ABC):
    """Computes the KV of a request again, from its tokens alone. Called on the engine's own thread between forwards, on
    the stream of the forwards. What an engine can't do it says: each method raises `CanaryError` with the reason.

    No request of a user may notice: no slot of the cache, no random number and no statistics of the engine change.
    """

    @abstractmethod
    def requests(self) -> Sequence[str]:
        """Names of the requests that have KV in the cache."""

    @abstractmethod
    def cached(self, request: str) -> CachedRequest:
        """The content of the cache for ``request``. Raises `CanaryError` if the request is not in the cache."""

    def outline(self, request: str) -> Outline:
        """Facts of ``request`` known to the host at no cost; those of `cached`, unless overridden."""
        cached = self.cached(request)
        return Outline(len(cached.tokens), bool(cached.touches))

    @property
    def pressed(self) -> bool:
        """Whether requests of users wait, or memory is short, so that nothing should be computed that nobody has asked
        for."""
        return False

    @property
    def recurrent(self) -> bool:
        """Whether layers of the model keep states, which sum up the roundings of all tokens before. Then ``jitter``
        rounds what is computed within these layers, too."""
        return False

    @property
    @abstractmethod
    def rounding(self) -> float:
        """Relative error of one rounding of the numbers that attention reads: the unit roundoff of their type, which is
        ``torch.finfo(dtype).eps / 2``; times ``sqrt(n)`` where sums of ``n`` numbers are kept in that type."""

    def attention(self) -> Mapping[int, AttentionRule | str]:
        """By layer: the rule of attention by the model's configuration, or the reason for which none is known. Empty
        where `compute` takes no observer. Read once, so later changes of the configuration are none of the rule's."""
        return {}

    @abstractmethod
    def compute(
        self, request: CachedRequest, chunk_tokens: int, jitter: float = 0.0, observer: AttentionObserver | None = None
    ) -> Mapping[str, Computed]:
        """The KV of ``request.tokens`` by name of a region, computed from nothing with the weights, adapter and
        numerics of the request, ``chunk_tokens`` tokens in one forward; with 1 the last tokens are computed one by
        one, and those before in larger forwards. Valid as long as it is held, also beside that of a later call.

        With ``jitter`` attention reads each number of K and V multiplied by a random one between ``1 - jitter`` and ``1
        + jitter``, from a generator of its own, and rounded to its type; returned is what was computed, without that
        factor.

        ``observer`` sees each forward's attention of its layer; it is given only where `attention` has rules."""
