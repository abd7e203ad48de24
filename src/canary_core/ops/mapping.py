"""Records of slots, and the verdict on slots read as a position of a sequence.

One rule for all judges in torch: the reference of the check before a forward, and sweeps of a prefix cache on the host.
`kernels.check` has the rule once more, for the device.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from canary_core.ops import hashing
from canary_core.records import (
    CONTENT,
    POSITION,
    PREFIX_HASH,
    STATES,
    STEP_FREED,
    STEP_WRITTEN,
    TOKEN,
    WRITER,
    Kind,
    Row,
    State,
    Status,
)

if TYPE_CHECKING:
    from canary_core.ops.state import RegionState

NOTHING = -1
"""The verdict on a faultless place."""

KINDS = (Kind.SLOT_RANGE, Kind.NULL_SLOT, Kind.UNWRITTEN, Kind.FREED, Kind.POSITION, Kind.TOKEN, Kind.PREFIX)
"""Possible verdicts; the first that holds is reported."""


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """The record behind each place, all ``[n]``; ``usable`` says whether there is one (else the fields are of any
    slot).

    ``state`` is `State.FREED` or the content: a reader does not care whether the slot is parked. ``word`` is the
    record's position word, ``freed`` the words `STEP_FREED` and `FREED_BY` as one number.
    """

    slot: Tensor
    status: Tensor
    state: Tensor
    position: Tensor
    word: Tensor
    token: Tensor
    hash: Tensor
    writer: Tensor
    step_written: Tensor
    freed: Tensor

    @classmethod
    def of(cls, records: Tensor, slot: Tensor, status: Tensor) -> "Seen":
        """From ``records``, int32 ``[n, RECORD_WORDS]``: the records of ``slot`` where ``status`` is `Status.OK`, of
        any slot elsewhere. On the device of the arguments."""
        word = records[:, POSITION].long()
        return cls(
            slot=slot,
            status=status,
            state=torch.where(word & State.FREED != 0, State.FREED, word & CONTENT),
            position=word // STATES,
            word=word,
            token=records[:, TOKEN].long(),
            hash=int64_words(records, PREFIX_HASH),
            writer=records[:, WRITER].long(),
            step_written=records[:, STEP_WRITTEN].long(),
            freed=int64_words(records, STEP_FREED),
        )

    def __getitem__(self, index: Tensor | slice) -> "Seen":
        """Of the places in ``index``: numbers, a mask, or a range."""
        return Seen(*(getattr(self, field)[index] for field in self.__slots__))

    @property
    def usable(self) -> Tensor:
        """Whether the place has a slot of the region."""
        return self.status == Status.OK

    def holds(self, position: Tensor) -> Tensor:
        """Whether the slot was written, and as ``position``."""
        return self.usable & (self.state == State.WRITTEN) & (self.position == position)

    def continues(self, position: Tensor, before: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Whether the prefix hash of each place, read as ``position``, continues ``before``, the hash of the position
        before; and the hash that would. True where the slot's own hash is unknown (0), or ``before`` is not
        ``known``."""
        should_be = before + hashing.mix(self.token, position)
        return (self.hash == should_be) | (self.hash == 0) | ~known, should_be

    def fields(self) -> dict[Row, Tensor]:
        """The stored record as fields of a finding; -1 where the slot has none."""
        stored = {
            Row.STORED_TOKEN: self.token,
            Row.STORED_POSITION: self.word,
            Row.STORED_VALUE: self.hash,
            Row.STORED_WRITER: self.writer,
            Row.STEP_WRITTEN: self.step_written,
            Row.FREED: self.freed,
        }
        return {word: torch.where(self.usable, value, -1) for word, value in stored.items()}


def see(state: "RegionState", slot: Tensor, status: Tensor) -> Seen:
    """Reads the records of ``slot`` where ``status`` is `Status.OK`, of slot 0 elsewhere. All int64 ``[n]``."""
    return Seen.of(state.records[torch.where(status == Status.OK, slot, 0)], slot, status)


def verdict(seen: Seen, position: Tensor, expected: Tensor, linked: Tensor) -> Tensor:
    """The first of `KINDS` that holds for each place, int64 ``[n]``, `NOTHING` for none.

    position: int64 ``[n]``, the position read. expected: int64 ``[n]``, the request's own token there, negative where
    unknown. linked: bool ``[n]``, whether the prefix hash fits the known sequence.
    """
    placed = seen.holds(position)
    own = (expected < 0) | (expected == seen.token)
    empty = (seen.state == State.UNWRITTEN) | (seen.state == State.ALLOCATED)
    holds = {
        Kind.SLOT_RANGE: seen.status == Status.RANGE,
        Kind.NULL_SLOT: seen.status == Status.NULL,
        Kind.UNWRITTEN: seen.usable & empty,
        Kind.FREED: seen.usable & (seen.state == State.FREED),
        Kind.POSITION: seen.usable & (seen.state == State.WRITTEN) & ~placed,
        Kind.TOKEN: placed & ~own,
        Kind.PREFIX: placed & ~linked,
    }
    found = torch.full_like(position, NOTHING)
    for kind in reversed(KINDS):
        found.masked_fill_(holds[kind], int(kind))
    return found


def int64_words(records: Tensor, first: int) -> Tensor:
    """Words ``first`` and ``first + 1`` of ``records`` (int32 ``[n, RECORD_WORDS]``) as one number: int64 ``[n]``."""
    return records[:, first : first + 2].contiguous().view(torch.int64)[:, 0]
