"""Injuries for diagnoses: what is done to a running engine from outside, through its own tables and functions, and what
the first diagnosis of it must be. `Patient` is an engine that they are done to."""

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from canary_core import Canary

ALICE, BOB = "alice", "bob"
"""The requests that a patient serves."""

PROMPT = 37
"""Tokens of a prompt: some pages, the last one not full."""

PATIENCE_S = 60
"""Seconds that a diagnosis may take on a machine that others use, too."""

Outcome = dict[str, Any]


class Patient(ABC):
    """A small engine that serves `ALICE` and `BOB`, who are decoding. ``layers``, ``halves``: of its model; ``page``:
    slots of a page as the region has them."""

    layers: int
    halves: Sequence[str]
    page: int

    @abstractmethod
    def cell(self, layer: int, half: str, request: str, position: int) -> Tensor:
        """The bytes of that KV in the engine's own memory, found through its own tables: uint8 ``[n]``, a view."""

    @abstractmethod
    def cached(self, request: str) -> int:
        """How many positions of the request are in the cache."""

    @abstractmethod
    def step(self) -> None:
        """One forward."""

    @property
    @abstractmethod
    def canary(self) -> Canary:
        """The guard of its pool."""

    def exchange_entries(self, one: tuple[str, int], other: tuple[str, int], both: bool) -> None:
        """The table's entry of a request and a page number becomes another's; with ``both`` they change places."""
        raise NotImplementedError

    def lose_writes(self, layers: Sequence[int]) -> None:
        """The stores of these layers don't run in the next forward."""
        raise NotImplementedError

    def do(self, what: str) -> None:
        """A bug of the engine's own bookkeeping, by name."""
        raise NotImplementedError

    def cells(self, request: str, positions: Sequence[int], sources: Sequence[tuple[int, str]] = ()) -> list[Tensor]:
        """Of all positions, in all layers and halves unless ``sources`` names them."""
        every = sources or [(layer, half) for layer in range(self.layers) for half in self.halves]
        return [self.cell(layer, half, request, p) for p in positions for layer, half in every]


Hurt = Callable[[Patient, random.Random], None]


@dataclass(frozen=True)
class Injury:
    """``right``: names of classes of which the first diagnosis must be one; ``hurt`` does it. ``alone``: the engine's
    books may be wrong afterwards."""

    right: tuple[str, ...]
    hurt: Hurt
    steps: int = 3
    alone: bool = False


def _somewhere(patient: Patient, rng: random.Random, room: int = 1) -> int:
    """A position of ``a``, with room for so many after it."""
    return rng.randrange(2, patient.cached(ALICE) - room - 1)


def _noise(cell: Tensor, rng: random.Random) -> None:
    """Numbers that nobody wrote there: small ones, so that none is NaN."""
    torch.manual_seed(rng.randrange(1 << 30))
    kind = torch.bfloat16 if len(cell) % 2 == 0 else torch.uint8
    cell.view(kind).copy_(torch.randn(cell.view(kind).shape).to(kind))


def flipped_bit(patient: Patient, rng: random.Random) -> None:
    """One bit of one slot in one source."""
    cell = patient.cell(rng.randrange(patient.layers), rng.choice(patient.halves), ALICE, _somewhere(patient, rng))
    cell[rng.randrange(len(cell))] ^= 1 << rng.randrange(8)


def two_flipped_bits(patient: Patient, rng: random.Random) -> None:
    """One bit each of two words of one slot in one source."""
    cell = patient.cell(rng.randrange(patient.layers), rng.choice(patient.halves), ALICE, _somewhere(patient, rng))
    for byte in rng.sample(range(0, len(cell), 4), 2):
        cell[byte] ^= 1 << rng.randrange(8)


def overwritten_word(patient: Patient, rng: random.Random) -> None:
    """Four bytes, most bits of which change."""
    cell = patient.cell(rng.randrange(patient.layers), rng.choice(patient.halves), ALICE, _somewhere(patient, rng))
    cell[4:8] = cell[4:8] ^ torch.tensor([0x5A, 0x3F, 0xE1, 0x3C], dtype=torch.uint8)


def _fill(value: int | float) -> Hurt:
    def hurt(patient: Patient, rng: random.Random) -> None:
        first = _somewhere(patient, rng, 4)
        for cell in patient.cells(ALICE, range(first, first + 4)):
            cell.view(torch.bfloat16).fill_(value) if isinstance(value, float) else cell.fill_(value)

    return hurt


def shifted(patient: Patient, rng: random.Random) -> None:
    """Six positions get what the one before them has, in all sources."""
    first = _somewhere(patient, rng, 6)
    for position in reversed(range(first, first + 6)):
        for to, of in zip(patient.cells(ALICE, [position]), patient.cells(ALICE, [position - 1]), strict=True):
            to.copy_(of)


def swapped(patient: Patient, rng: random.Random) -> None:
    """Four slots of one request change places with those of the other."""
    first = _somewhere(patient, rng, 4)
    for p in range(first, first + 4):
        for one, other in zip(patient.cells(ALICE, [p]), patient.cells(BOB, [p]), strict=True):
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)


def overwritten(patient: Patient, rng: random.Random) -> None:
    """Four slots get what the other request has one position later."""
    first = _somewhere(patient, rng, 6)
    for p in range(first, first + 4):
        for to, of in zip(patient.cells(ALICE, [p]), patient.cells(BOB, [p + 1]), strict=True):
            to.copy_(of)


def wrong_layer(patient: Patient, rng: random.Random) -> None:
    """One slot gets another layer's bytes."""
    one, other = rng.sample(range(patient.layers), 2)
    half, position = rng.choice(patient.halves), _somewhere(patient, rng)
    patient.cell(one, half, ALICE, position).copy_(patient.cell(other, half, ALICE, position))


def every_nth(patient: Patient, rng: random.Random) -> None:
    """Every third or fifth token, in all sources."""
    step = rng.choice((3, 5))
    for cell in patient.cells(ALICE, range(rng.randrange(2, 5), patient.cached(ALICE) - 1, step)):
        _noise(cell, rng)


def one_half(patient: Patient, rng: random.Random) -> None:
    """Three slots, in K or V of all layers."""
    half, first = rng.choice(patient.halves), _somewhere(patient, rng, 3)
    for cell in patient.cells(ALICE, (first, first + 1, first + 3), [(i, half) for i in range(patient.layers)]):
        _noise(cell, rng)


def one_layer(patient: Patient, rng: random.Random) -> None:
    """Seven slots, in both halves of one layer."""
    layer, first = rng.randrange(patient.layers), _somewhere(patient, rng, 8)
    for cell in patient.cells(ALICE, (first, *range(first + 2, first + 8)), [(layer, h) for h in patient.halves]):
        _noise(cell, rng)


def stray_write(patient: Patient, rng: random.Random) -> None:
    """One slot in one source."""
    layer, half = rng.randrange(patient.layers), rng.choice(patient.halves)
    _noise(patient.cell(layer, half, ALICE, _somewhere(patient, rng)), rng)


def page_overwritten(patient: Patient, rng: random.Random) -> None:
    """All slots of a page, in all sources."""
    first = patient.page * rng.randrange(1, patient.cached(ALICE) // patient.page - 1)
    for cell in patient.cells(ALICE, range(first, first + patient.page)):
        _noise(cell, rng)


def torn_copy(patient: Patient, rng: random.Random) -> None:
    """The first slots of a page, in all sources."""
    first = patient.page * rng.randrange(1, patient.cached(ALICE) // patient.page - 1)
    for cell in patient.cells(ALICE, range(first, first + patient.page // 2 + 1)):
        _noise(cell, rng)


def page_edge(patient: Patient, rng: random.Random) -> None:
    """The first or last slot of three pages."""
    edge = rng.choice((0, patient.page - 1))
    for cell in patient.cells(ALICE, [n * patient.page + edge for n in (1, 2, 3)]):
        _noise(cell, rng)


def stale_table(patient: Patient, rng: random.Random) -> None:
    """An entry of one request becomes the other's."""
    patient.exchange_entries((ALICE, 1), (BOB, 1), both=False)


def wrong_position(patient: Patient, rng: random.Random) -> None:
    """Two entries of one request change places."""
    patient.exchange_entries((ALICE, 0), (ALICE, 2), both=True)


def lost_write(patient: Patient, rng: random.Random) -> None:
    """No store of the next forward runs."""
    patient.lose_writes(range(patient.layers))


def lost_write_of_a_layer(patient: Patient, rng: random.Random) -> None:
    """No store of one layer runs in the next forward."""
    patient.lose_writes([rng.randrange(patient.layers)])


def _does(what: str) -> Hurt:
    return lambda patient, rng: patient.do(what)


INJURIES: dict[str, Injury] = {
    "a flipped bit": Injury(("flipped_bit",), flipped_bit),
    "two flipped bits": Injury(("flipped_bit",), two_flipped_bits),
    "a word overwritten": Injury(("overwritten_word",), overwritten_word),
    "zeros": Injury(("zeroed",), _fill(0)),
    "NaN": Injury(("poisoned",), _fill(float("nan")), alone=True),
    "one byte all over": Injury(("constant",), _fill(0xAB)),
    "shifted by one": Injury(("shifted",), shifted),
    "slots exchanged": Injury(("swapped",), swapped),
    "overwritten by another request": Injury(("overwritten",), overwritten),
    "another layer's KV": Injury(("wrong_layer",), wrong_layer),
    "every n-th token": Injury(("every_nth",), every_nth),
    "one half, all layers": Injury(("one_half",), one_half),
    "one layer, many tokens": Injury(("one_layer",), one_layer),
    "one slot, one source": Injury(("stray_write",), stray_write),
    "a whole page": Injury(("page_overwritten",), page_overwritten),
    "half of a page": Injury(("torn_copy",), torn_copy),
    "the edge of each page": Injury(("page_edge",), page_edge),
    "a stale table entry": Injury(("stale_table",), stale_table, alone=True),
    "table entries exchanged": Injury(("wrong_position",), wrong_position, alone=True),
    "all stores lost": Injury(("lost_write",), lost_write, alone=True),
    "one layer's store lost": Injury(("lost_write_of_a_layer",), lost_write_of_a_layer, alone=True),
    "freed while running": Injury(("use_after_free",), _does("release_running"), alone=True),
    "released twice": Injury(("double_free",), _does("release_again"), alone=True),
    "handed out twice": Injury(("double_allocation",), _does("hand_out_held"), alone=True),
    "evicted in use": Injury(("evicted_in_use",), _does("evict_in_use"), alone=True),
    "stored in another slot": Injury(("wrong_write_slot",), _does("misplace_write"), alone=True),
    "two tokens in one slot": Injury(("two_writers",), _does("two_writers"), alone=True),
    "input tokens exchanged": Injury(("batch_input",), _does("exchange_inputs"), alone=True),
    "a prefix of another request": Injury(("foreign_prefix",), _does("foreign_prefix"), steps=4, alone=True),
    "padding in a live row": Injury(("padding",), _does("null_entry"), alone=True),
    "a prefix published too early": Injury(("unfilled_prefix",), _does("publish_early"), steps=4, alone=True),
}
"""By what is done."""


SEEDS = (1, 2, 3)
"""Of the table in docs/incidents.md."""


def summed_up(told: Outcome) -> Outcome:
    """What the table in docs/incidents.md needs of an outcome."""
    return {name: told[name] for name in ("injury", "right", "first", "sure", "incidents")}


def hurt(patient: Patient, name: str, seed: int) -> Outcome:
    """Does an injury; gives its first diagnosis, and what else was told."""
    injury = INJURIES[name]
    patient.canary.drain()
    before = len(patient.canary.incidents)
    numbers = {incident.number for incident in patient.canary.incidents}
    injury.hurt(patient, random.Random(seed))
    for _ in range(injury.steps):
        patient.step()
    patient.canary.drain()
    new = [incident for incident in patient.canary.incidents if incident.number not in numbers]
    if not new:
        return {"injury": name, "right": injury.right, "first": "none", "sure": "", "incidents": 0, "before": before}
    deadline = time.monotonic() + PATIENCE_S
    while not new[0].diagnoses and time.monotonic() < deadline:
        time.sleep(0.05)
    diagnosis = new[0].diagnoses[0]
    return {
        "injury": name,
        "right": injury.right,
        "first": diagnosis.name,
        "sure": diagnosis.sure,
        "others": [d.name for d in new[0].diagnoses[1:]],
        "evidence": diagnosis.evidence,
        "root": new[0].root.kind.name.lower(),
        "findings": new[0].total,
        "incidents": len(new),
        "later": [f"{i.root}"[:200] for i in new[1:4]],
    }
