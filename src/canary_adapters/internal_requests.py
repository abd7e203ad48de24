"""`InternalRequests`: the part of an engine's scheduler used by recompute, and the messages to workers."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from canary_adapters.parked_prefixes import PARKED, GroupBlocks, ParkedPrefix, ParkedPrefixes
from canary_core import Touch

PREFIX = "canary-recompute-"
"""Internal requests are called so."""

LEAST_TOKENS = 32
"""Of a request to be computed again without being asked for, and of its decoded part to teach noise: fewer have no
verdict. So many more must be there until the same request is chosen again."""


@dataclass(frozen=True, slots=True)
class Running:
    """A running request. tokens: those with KV that the host knows; decoded: how many of these one by one. life:
    another number after each preemption. beyond_tokens: whether an adapter, media or embeddings have a say in its
    KV."""

    name: str
    tokens: int
    decoded: int
    life: int
    beyond_tokens: bool = False


@dataclass(frozen=True, slots=True)
class RecomputePair:
    """A message to the workers: with the forward of the same message the internal request ``again`` has computed the
    first ``tokens`` tokens of ``request``. Blocks of both during that forward: ``held`` and ``own``. why: the
    reason why nothing can be compared, None if there is none. asked: whether a caller waits for the answer. decoded: as
    of `Running`. parked, content: of a parked prefix, named `PARKED` and the request, the number of tokens at the end
    of the request, and the ids of ``tokens``; more are gone. names: in answer to the request `ALL_PARKED`; of
    running requests, where none has the name ``request``.
    """

    request: str
    again: str = ""
    tokens: int = 0
    decoded: int = 0
    held: GroupBlocks = ()
    own: GroupBlocks = ()
    touches: tuple[Touch, ...] = ()
    why: str | None = None
    asked: bool = False
    parked: int | None = None
    content: Sequence[int] = ()
    names: Sequence[str] = ()

    @property
    def teaches(self) -> bool:
        """Whether noise may be learnt from it. A request that only ran through a prefill took the way of ``again``."""
        return self.decoded >= LEAST_TOKENS and not self.touches and self.parked is None


class InternalRequests(ABC):
    """The part of an engine's scheduler used by recompute. Called on the scheduler's own thread, between two batches
    in the making.

    parked: the prefixes of ended requests, known to all methods by `PARKED` and the request's name; or the reason for
    none. longest: most tokens of a request with its answer, 0 where an internal request can't decode.
    """

    parked: ParkedPrefixes | str = "of this engine Canary remembers running requests only"
    longest: int = 0

    def prefix(self, name: str) -> ParkedPrefix | None:
        """A remembered prefix by `PARKED` and the request's name; None for any other name."""
        if isinstance(self.parked, str) or not name.startswith(PARKED):
            return None
        return self.parked.get(name.removeprefix(PARKED))

    @abstractmethod
    def running(self) -> Sequence[Running]:
        """Requests of users with KV."""

    @abstractmethod
    def find(self, name: str) -> Running | None:
        """One of `running`, None for no such request."""

    @abstractmethod
    def room(self, request: str) -> bool:
        """Whether no request waits, and a second ``request`` would fit in beside all others."""

    def hindered(self, prefix: ParkedPrefix) -> str | None:
        """Why ``prefix`` can't be computed again just now, None if it can: an adapter must be loaded already."""
        return None

    def spare(self, request: str) -> bool:
        """Whether a proof of a parked prefix has room in an idle engine: in blocks without use for the prefix cache. If
        need be evicts what the next request would evict, at most `PROOF_SHARE` of the pool and nothing of the prefix
        itself; counts that by `ParkedPrefixes.evicted`."""
        return False

    @abstractmethod
    def begin(self, name: str, request: str, tokens: int, new_tokens: int = 1) -> str | None:
        """Queues an internal request ``name`` with the first ``tokens`` tokens of ``request``: last in line, of so many
        ``new_tokens``, never read from the prefix cache and never kept there. Returns the reason why not, None for
        done."""

    @abstractmethod
    def computed(self, name: str) -> int | None:
        """Number of tokens of an internal request computed with the last batch made; None after the end of the
        request."""

    @abstractmethod
    def crowded(self, name: str) -> bool:
        """Whether requests of users wait, or would go first, for the seat and blocks of an internal request."""

    @abstractmethod
    def blocks(self, name: str) -> GroupBlocks:
        """The blocks of any request during the last batch made."""

    @abstractmethod
    def end(self, name: str) -> None:
        """Ends an internal request in any state."""

    def failed(self) -> None:
        """Nothing is computed again any more, after an exception of ours."""
        return


@dataclass(slots=True)
class Internal:
    """An internal request under way, for ``target``. waited: whether a batch was made since it began. parked: the
    prefix in the place of a running request."""

    name: str
    target: Running
    asked: bool
    waited: bool = False
    parked: ParkedPrefix | None = None


def named_like(name: str, running: Iterable[str]) -> list[str]:
    """The running requests meant by ``name``: the one of that name, else all whose names go on behind it with a hyphen.
    vLLM's server puts ``cmpl-`` or ``chatcmpl-`` before a client's name, and numbers behind."""
    names = list(running)
    heads = tuple(f"{before}{name}-" for before in ("", "cmpl-", "chatcmpl-"))
    return [name] if name in names else [one for one in names if one.startswith(heads)]


def is_internal(name: str) -> bool:
    """Whether a request has the name of an internal one."""
    return name.startswith(PREFIX)


def slots_of(blocks: Sequence[int], block_slots: int, tokens: int) -> list[int]:
    """The slot of each of the first ``tokens`` positions in a list of blocks, -1 for none."""
    slots: list[int] = []
    for block in blocks[: -(-tokens // block_slots)]:
        slots.extend(range(block * block_slots, (block + 1) * block_slots) if block > 0 else [-1] * block_slots)
    return [*slots, *[-1] * (tokens - len(slots))][:tokens]
