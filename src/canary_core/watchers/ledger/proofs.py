"""`Proofs`: certain faults of returned blocks, whoever may store at the origin: nothing came, not all came, or the
bytes belong to other tokens or to another identity."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from canary_core.ops import arrivals, hashing
from canary_core.ops.sources import descriptor
from canary_core.ops.state import RegionState
from canary_core.records import BLOCK_FLAGS, BLOCK_SLOT, BLOCK_SUM, BLOCK_VALUES, BLOCK_WHO, Block, Descriptor
from canary_core.runtime.writers import Writers
from canary_core.watchers.ledger.arrival import Arrival
from canary_core.watchers.ledger.table import Holder, Table
from canary_core.watchers.ledger.wording import fold, positions

MOST_BEFORE = 16384
"""Most blocks whose content from before a load is remembered; of earlier ones nobody sees that nothing came."""

MOST_LOOKED_AT = 4096
"""Entries among which two identities' KV of the same tokens is sought."""


@dataclass(frozen=True, slots=True)
class Disproof:
    """``rule``: the fault, also the name of the count. ``columns``: the sources concerned. ``stored_request``,
    ``stored_position``: of the bytes; ``stored_value``: the right value of the first source. ``identities``: those of
    request and bytes, in words."""

    rule: str
    columns: Sequence[int]
    detail: str
    stored_request: str | None = None
    stored_position: int | None = None
    stored_value: int | None = None
    identities: tuple[str, str] | None = None


class Came(NamedTuple):
    """Returned blocks of an arrival: number of each, block rows, prefix hashes and growths; ``own``: whether only this
    engine can have stored the bytes, under another prefix than the block's."""

    arrival: Arrival
    blocks: Sequence[int]
    rows: Tensor
    hashes: Sequence[int]
    sums: Sequence[int]
    own: Sequence[bool]


class Proofs:
    """Of one region. Content from before a load is remembered by slot; bytes and tokens belong together for ever."""

    def __init__(self, state: RegionState, table: Table, page_slots: int, writers: Writers) -> None:
        self._state = state
        self._table = table
        self._page_slots = page_slots
        self._writers = writers
        sources = list(state.sources)
        self._sources = sources
        self._members = state.sources.members
        sure = [descriptor(sources[group[0]], False)[Descriptor.SURE] != 0 for group in self._members]
        self._sure = torch.tensor(sure, device="cpu")
        # Zeros are nobody's.
        keys = state.sources.fingerprint_keys
        zeros = keys.sources(len(state.sources.salts))[-state.sources.columns :]
        self._blank = zeros * keys.places(page_slots).sum()
        self._before: dict[int, Tensor] = {}
        self._apart: dict[tuple[int, int], bool] = {}

    def remember(self, rows: Tensor) -> None:
        """Block rows from before a load, with `arrivals.content_before` in them."""
        for row in rows[rows[:, BLOCK_FLAGS] & (Block.BYTES | Block.OUTSIDE) == Block.BYTES]:
            slot = int(row[BLOCK_SLOT])
            self._before.pop(slot, None)
            self._before[slot] = row
        while len(self._before) > MOST_BEFORE:
            self._before.pop(next(iter(self._before)))

    def of(self, came: Came, doubtful: Collection[int]) -> dict[int, Disproof]:
        """The faults of blocks, by index in ``came``. ``doubtful``: blocks not known to be right."""
        before = [self._before.pop(slot, None) for slot in came.rows[:, BLOCK_SLOT].tolist()]
        found: dict[int, Disproof] = {}
        rest = []
        for i in doubtful:
            old = before[i]
            proof = None if old is None else self._unchanged(came, i, old)
            if proof is None:
                rest.append(i)
            else:
                found[i] = proof
        if rest:
            values = came.rows[rest, BLOCK_VALUES:]
            for i, holder in zip(rest, self._table.holders(values), strict=True):
                proof = None if holder is None else self._foreign(came, i, holder)
                if proof is not None:
                    found[i] = proof
        return found

    def _unchanged(self, came: Came, i: int, before: Tensor) -> Disproof | None:
        """Bytes of some sources are those from before the load, and the tokens are others."""
        arrival, row = came.arrival, came.rows[i]
        same = (before[BLOCK_VALUES:] == row[BLOCK_VALUES:]).view(len(self._sure), -1).all(1) & self._sure
        if not bool(same.any()) or self._passed(arrival, came.blocks[i]):
            return None
        if int(before[BLOCK_SUM]) == int(arrivals.token_sums(self._tokens(came, i)[None])):
            return None
        columns = sorted(i for group in same.nonzero()[:, 0].tolist() for i in self._members[group])
        where = positions(arrival.blocks.position(came.blocks[i]), self._page_slots)
        whose = self._writers.name(int(before[BLOCK_WHO]) >> 32)
        if bool((same == self._sure).all()):
            of = f", which {whose} left there" if whose else ""
            return Disproof("nothing_came", columns, f"{where}{of}", whose)
        return Disproof("left_out", columns, f"{where}; {fold(self._sources, columns, 'as before the load')}", whose)

    def _tokens(self, came: Came, i: int) -> Tensor:
        return came.arrival.blocks.inside(came.arrival.blocks.tokens).view(-1, self._page_slots)[came.blocks[i]]

    def _passed(self, arrival: Arrival, block: int) -> bool:
        """Whether the block lies before the window of all later tokens, and need not be brought."""
        region, end = self._state.region, arrival.blocks.first + len(arrival.blocks.tokens)
        behind = arrival.blocks.position(block) + self._page_slots
        return region.window_tokens is not None and behind <= region.passed(end)

    def _foreign(self, came: Came, i: int, holder: Holder) -> Disproof | None:
        """The bytes are those of ``holder``, and not of the arrival's prefix."""
        arrival = came.arrival
        if torch.equal(came.rows[i, BLOCK_VALUES:], self._blank):
            return None
        every = range(len(self._sources))
        where = positions(arrival.blocks.position(came.blocks[i]), self._page_slots)
        whose, position = self._writers.name(holder.who >> 32), holder.who & 0xFFFFFFFF
        these = "this is" if self._page_slots == 1 else "these are"
        said = f"{these} {positions(position, self._page_slots)} of {whose or 'another sequence'}"
        if holder.sum != came.sums[i]:
            tokens = self._tokens(came, i)
            if int(hashing.mix(tokens, position + torch.arange(len(tokens), device="cpu")).sum()) == holder.sum:
                # The same tokens elsewhere: without positions, and in an even context, a model computes the same KV.
                return None
            return Disproof("another_sequence", every, f"{where}; {said}", whose, position)
        own, other = arrival.anchor, hashing.signed(holder.hash - came.hashes[i] + arrival.anchor)
        identities = self._writers.identities
        mine = identities.of(own)
        if not own or own == other or mine is None or identities.of(other) is None:
            return None
        if identities.same_but_weights(own, other):
            # Others may store the same bytes of newer weights, where a change is of no consequence for these tokens.
            # And a request that ran while the weights changed may have computed them with the new ones.
            if not came.own[i] or not identities.older(holder.forwards, mine.weights):
                return None
        elif not came.own[i] and not self._differ(own, other):
            return None
        named = identities.tell(own, other)
        names = str(named and named[0]), str(named and named[1])
        told = f"{where}; {said}, with {names[1]}, and this request has {names[0]}"
        return Disproof("another_identity", every, told, whose, position, identities=names)

    def _differ(self, own: int, other: int) -> bool:
        """Whether KV of the same tokens is known to differ under two identities, by anchors: salts change nothing, and
        an adapter need not."""
        known = self._apart.get((own, other))
        if known is not None:
            return known
        for hash in self._table.hashes(MOST_LOOKED_AT):
            same_tokens = hashing.signed(hash - own + other)
            if self._table.has(same_tokens):
                mine, theirs = (self._table.rows([h])[2] for h in (hash, same_tokens))
                differ = not bool((mine[:, None] == theirs[None]).all(2).any())
                self._apart[own, other] = differ
                return differ
        return False
