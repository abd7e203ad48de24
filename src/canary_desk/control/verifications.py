"""`Verifications`: asks of the control socket's clients for verdicts on running requests, until answered."""

import json
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import ref

from canary_core.config import CanaryConfig
from canary_core.errors import CanaryError, error_text
from canary_desk.control.messages import MOST_REPLY_BYTES

if TYPE_CHECKING:
    from canary_core.guard.canary import Canary
    from canary_core.watchers.recompute.verification import Verification

MOST_OPEN = 64
"""Asks of clients at a time."""
LEASE_S = 30.0
"""Longest time from one look of a client to the next. A later client counts as gone, and its ask is cancelled."""
PAGE_BYTES = MOST_REPLY_BYTES // 4
"""Bytes of answers in one reply; the last answer may go beyond."""

NOBODY = (
    "no engine in it can compute a request again: either Canary is off, or this engine has no recomputer; "
    "docs/verify.md lists those that have one"
)
ENDED = "the engine ended, or Canary was switched off in it, before it was verified; ask while it runs"


@dataclass(slots=True, eq=False)
class _Part:
    """One engine's share of an ask, which keeps no Canary alive. forwards: before the ask."""

    canary: "ref[Canary]"
    place: dict[str, Any]
    answer: "Future[list[Verification]]"
    forwards: int

    @property
    def since(self) -> int:
        """Forwards since the ask."""
        canary = self.canary()
        return 0 if canary is None else canary.forwards - self.forwards


@dataclass(slots=True, eq=False)
class _Ticket:
    parts: list[_Part]
    open: list[_Part]
    looked: float
    told: list[dict[str, Any]] = field(default_factory=list)


class Verifications:
    """Hands requests of clients to the verifiers of Canaries, and keeps the answers. On the socket's thread: never
    waits, computes nothing and touches no device. The work is done by engines, in a moment of their own choice."""

    def __init__(self) -> None:
        self._asks: dict[str, _Ticket] = {}

    def begin(self, canaries: "Sequence[Canary]", request: str | None, parked: bool = False) -> dict[str, Any]:
        """Asks for ``request``, or (None) for all; ``parked``: for prefixes of ended requests. The result has
        ``asked``, the number of engines asked, and a ``ticket`` for `look`, and their ``replicas``; with 0 engines
        ``why`` instead."""
        if len(self._asks) >= MOST_OPEN:
            raise CanaryError(
                f"{len(self._asks)} verifications are asked for and not answered yet, and no more are taken; try again "
                "once some have been answered"
            )
        parts = []
        for canary in canaries:
            if canary.enabled and canary.verifier is not None:
                asks = canary.verifier.ask
                asked = asks(request, parked=True) if parked else asks(request)
                parts.append(_Part(ref(canary), _place(canary.config), asked, canary.forwards))
        if not parts:
            return {"asked": 0, "why": NOBODY}
        ticket = secrets.token_hex(8)
        self._asks[ticket] = _Ticket(parts, list(parts), time.monotonic())
        replicas = sorted({f"{part.place['replica']} of {part.place['model']}" for part in parts})
        return {"asked": len(parts), "ticket": ticket, "replicas": replicas}

    def look(self, canaries: "Sequence[Canary]", ticket: str, after: int) -> dict[str, Any]:
        """Answers behind the first ``after`` ones, as many as fit in a reply, with ``left`` behind these; ``pending``:
        engines that have not answered; ``forwards``: that ran since the ask; ``asks``: of all clients."""
        ask = self._asks.get(ticket)
        if ask is None:
            raise CanaryError(
                f"no verification {ticket!r} is asked for here: nobody looked for {LEASE_S:g} s; ask again"
            )
        ask.looked = time.monotonic()
        for part in list(ask.open):
            alive = any(part.canary() is canary and canary.enabled for canary in canaries)
            if part.answer.done() or not alive:
                ask.open.remove(part)
                ask.told += _told(part)
        page, size = [], 0
        for one in ask.told[after:]:
            page.append(one)
            size += len(json.dumps(one))
            if size > PAGE_BYTES:
                break
        return {
            "answers": page,
            "left": len(ask.told) - after - len(page),
            "pending": len(ask.open),
            "asks": len(self._asks),
            "forwards": sum(part.since for part in ask.parts),
        }

    def forget(self, ticket: str) -> dict[str, Any]:
        """Cancels the ask of a ticket."""
        ask = self._asks.pop(ticket, None)
        for part in ask.open if ask is not None else ():
            part.answer.cancel()
        return {"changed": int(ask is not None)}

    def sweep(self) -> None:
        """Forgets the asks of clients that have gone."""
        late = time.monotonic() - LEASE_S
        for ticket in [ticket for ticket, ask in self._asks.items() if ask.looked < late]:
            self.forget(ticket)


def _place(config: CanaryConfig) -> dict[str, Any]:
    return {"model": config.model or config.served_model, "replica": config.replica, "rank": config.rank}


def _told(part: _Part) -> list[dict[str, Any]]:
    """The answers of an engine, each with its place; or one with an ``error``."""
    if not part.answer.done():
        part.answer.cancel()
        return [{**part.place, "error": ENDED}]
    try:
        return [{**part.place, **one.to_dict()} for one in part.answer.result(0)]
    except CanaryError as error:
        return [{**part.place, "error": str(error)}]
    except BaseException as error:  # also a cancelled ask
        return [{**part.place, "error": error_text(error)}]
