"""What goes wrong in one step of `gpu.engine`, and which findings must come of it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from gpu.engine import LAYERS, SLOTS, Request, Run, Step

from canary_core import Kind

PLACES = [(layer, half) for layer in range(LAYERS) for half in range(2)]


@dataclass
class Fault:
    """One way in which a step goes wrong. ``findings`` are the (kind, slot, source) that must come, ``kinds`` those
    that may; ``undo`` makes the engine sound again, None where it can't be."""

    findings: set[tuple[Kind, int, str | None]]
    kinds: set[Kind] = field(default_factory=set)
    undo: Callable[[], None] | None = None


Inject = Callable[[Run, Step], Fault]


def reader(step: Step) -> Request:
    """A request that reads at least 3 slots in this step and goes on after it."""
    return next(r for r, n in zip(step.rows, step.new, strict=True) if r and r.cached >= 3 and fits(r, n))


def fits(r: Request, new: int) -> bool:
    """Whether the request has tokens left for two more steps."""
    return r.cached + new + 2 <= len(r.tokens)


def ready(step: Step) -> bool:
    """Whether every fault finds its place in the step: a reader, and new tokens of two requests at least."""
    rows = [(r, n) for r, n in zip(step.rows, step.new, strict=True) if r]
    return sum(n > 0 for _, n in rows) >= 2 and any(r.cached >= 3 and fits(r, n) for r, n in rows)


def name(layer: int, half: int) -> str:
    """What findings call the source."""
    return f"{'kv'[half]}.{layer}"


def written(step: Step) -> list[int]:
    """Slots that the step writes, in batch order."""
    return [r.slots[p] for r, p in step.live]


def table_entry(to: Callable[[Request], int], kind: Kind) -> Inject:
    """The entry of position 1 points elsewhere."""

    def inject(run: Run, step: Step) -> Fault:
        r = reader(step)
        entry, old = run.model.table[r.table_row, 1], r.slots[1]
        entry.fill_(to(r))
        # The link from the wrong slot to the next one may be broken as well.
        return Fault({(kind, to(r), None)}, {Kind.PREFIX}, lambda: entry.fill_(old))

    return inject


def foreign_slot(run: Run, step: Step) -> Fault:
    """The entry of position 1 is another request's slot of the same position, with another token."""
    r = reader(step)
    others = [o for o in (*run.traffic.running, *run.traffic.finished) if o.cached > 1 and o.tokens[1] != r.tokens[1]]
    entry, foreign = run.model.table[r.table_row, 1], others[0].slots[1]
    entry.fill_(foreign)
    return Fault({(Kind.TOKEN, foreign, None)}, {Kind.PREFIX}, lambda: entry.fill_(r.slots[1]))


def flipped_bit(layer: int, half: int) -> Inject:
    """A bit flips between two replays, in a slot that is only read."""

    def inject(run: Run, step: Step) -> Fault:
        slot = reader(step).slots[2]
        row = run.model.pools[layer][half].view(torch.int16)[slot]
        row[5] ^= 64

        def undo() -> None:
            row[5] ^= 64

        return Fault({(Kind.BYTES, slot, name(layer, half))}, undo=undo)

    return inject


def stray_write(layer: int, half: int) -> Inject:
    """The forward itself writes where it should not."""

    def inject(run: Run, step: Step) -> Fault:
        m, slot = run.model, reader(step).slots[0]
        m.stray_slot.fill_(slot)
        m.stray_mask[layer, half] = 0x0101

        def undo() -> None:
            m.stray_mask.zero_()
            m.pools[layer][half].view(torch.int16)[slot] ^= 0x0101

        return Fault({(Kind.BYTES, slot, name(layer, half))}, undo=undo)

    return inject


def lost_write(layer: int, half: int) -> Inject:
    """The forward stores what was there before."""

    def inject(run: Run, step: Step) -> Fault:
        lost = run.model.lost[layer, half]
        lost.fill_(True)
        findings = {(Kind.LOST_WRITE, slot, name(layer, half)) for slot in written(step)}
        return Fault(findings, undo=lambda: lost.fill_(False))

    return inject


def not_a_number(layer: int, half: int) -> Inject:
    """The forward stores NaN; what is computed from it, in layers above, is NaN too."""

    def inject(run: Run, step: Step) -> Fault:
        run.model.nan[layer, half] = True
        return Fault({(Kind.NON_FINITE, slot, name(layer, half)) for slot in written(step)})

    return inject


def swapped_tokens(run: Run, step: Step) -> Fault:
    """Two requests' tokens trade places in the input."""
    (first, second), ids = two_tokens(step), run.model.token_ids
    ids[[first, second]] = ids[[second, first]]
    slots = written(step)
    return Fault({(Kind.WRITE_INPUT, slots[first], None), (Kind.WRITE_INPUT, slots[second], None)})


def two_writers(run: Run, step: Step) -> Fault:
    """One slot is handed out for two tokens: the one with the lower index loses, and the other one will be read from
    where it was not written."""
    first, second = two_tokens(step)
    slot = written(step)[first]
    run.model.write_slots[second] = slot
    return Fault({(Kind.TWO_WRITERS, slot, None), (Kind.WRITE_SLOT, slot, None)})


def null_slot(run: Run, step: Step) -> Fault:
    """A live token is written to the padding slot."""
    run.model.write_slots[two_tokens(step)[1]] = 0
    return Fault({(Kind.NULL_SLOT, 0, None)})


def freed_slot(run: Run, step: Step) -> Fault:
    """A slot is given back while its request goes on."""
    slot = reader(step).slots[1]
    run.canary.slots.free("full", torch.tensor([slot], device=run.device))
    return Fault({(Kind.FREED, slot, None)})


def freed_twice(run: Run, step: Step) -> Fault:
    """A slot that nobody uses is given back twice."""
    slots = torch.tensor([run.traffic.free[-1]], device=run.device)
    run.canary.slots.free("full", slots)
    run.canary.slots.free("full", slots)
    return Fault({(Kind.DOUBLE_FREE, int(slots), None)})


def two_tokens(step: Step) -> tuple[int, int]:
    """Indices of two new tokens, of different requests."""
    live = step.live
    return 0, next(i for i, (r, _) in enumerate(live) if r is not live[0][0])


FAULTS: dict[str, Inject] = {
    "table_entry": table_entry(lambda r: r.slots[2], Kind.POSITION),
    "table_beyond": table_entry(lambda r: SLOTS + 5, Kind.SLOT_RANGE),
    "table_null": table_entry(lambda r: 0, Kind.NULL_SLOT),
    "foreign_slot": foreign_slot,
    "swapped_tokens": swapped_tokens,
    "two_writers": two_writers,
    "null_slot": null_slot,
    "freed_slot": freed_slot,
    "freed_twice": freed_twice,
    **{f"flipped_bit_{name(*p)}": flipped_bit(*p) for p in PLACES},
    **{f"stray_write_{name(*p)}": stray_write(*p) for p in PLACES},
    **{f"lost_write_{name(*p)}": lost_write(*p) for p in PLACES},
    **{f"not_a_number_{name(*p)}": not_a_number(*p) for p in PLACES},
}
