"""Messages on the control socket: one line of JSON each way. `Request` is one question, `Reply` its answer.

A line has at most `MOST_REQUEST_BYTES` or `MOST_REPLY_BYTES`. Nothing but these models is ever made from a received
line.
"""

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MOST_REQUEST_BYTES = 4096
MOST_REPLY_BYTES = 1 << 20

MOST_VALUE = 512
"""Characters of a value: names of requests are the longest."""

Command = Literal["status", "dump", "mode", "budget", "pause", "resume", "ack", "verify", "verified", "forget"]
CHANGES: frozenset[Command] = frozenset({"mode", "budget", "pause", "resume", "ack", "verify"})
"""Commands that act on the engine: refused unless ``CANARY_CONTROL=write``. A verification changes nothing, but the
engine computes, beside or between the forwards of its users."""


class Request(BaseModel):
    """One question. ``value``: the new value for `mode` and `budget`, a signature for ``ack``, a request for ``verify``
    (None: all that run), its ticket for ``verified`` and ``forget``; else None. ``parked``: for ``verify``, the
    parked prefixes of ended requests. ``after``: for ``verified``, the number of answers that the client has."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    command: Command
    value: str | None = Field(default=None, max_length=MOST_VALUE)
    parked: bool = False
    after: int = Field(default=0, ge=0)

    @classmethod
    def parse(cls, line: bytes) -> "Request":
        """From one line. Raises `ValueError` with a sentence for the sender."""
        try:
            return cls.model_validate_json(line)
        except ValidationError as error:
            told = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'the line'}: {e['msg']}" for e in error.errors()[:3])
            raise ValueError(f"a request is one line of JSON such as {{'command': 'status'}}, got: {told}") from None
        except RecursionError:
            raise ValueError(
                "a request is one line of JSON such as {'command': 'status'}, got one nested too deep"
            ) from None

    def line(self) -> bytes:
        """The line on the socket."""
        return self.model_dump_json(exclude_defaults=True).encode() + b"\n"


class Reply(BaseModel):
    """One answer. ``error``: the refusal, in a sentence; None on success. ``result``: by command."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    result: dict[str, Any] = {}
    error: str | None = None

    def line(self) -> bytes:
        """The line on the socket; in place of a too long one, a reply about its length."""
        text = json.dumps(self.model_dump(), default=str).encode() + b"\n"
        if len(text) <= MOST_REPLY_BYTES:
            return text
        refused = Reply(error=f"the answer has {len(text)} bytes, and at most {MOST_REPLY_BYTES} are sent")
        return refused.line()
