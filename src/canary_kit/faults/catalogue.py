"""Every fault: moment, function, and description."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from canary_core.ops.mapping import Seen, see
from canary_core.ops.state import RegionState
from canary_core.ops.torch import plan
from canary_core.ops.torch.check import expected_tokens
from canary_core.records import STEP_WRITTEN, Kind, State, Status
from canary_core.region import KVSource, RegionKind, Role
from canary_kit.faults.scene import Injection, Pending, Scene, read_bytes, write_bytes

FaultMoment = Literal["pre_forward", "post_forward", "recorded"]

PICKS = 32
"""Pairs of slots drawn by a fault before it gives up for the forward."""


def _flip(scene: Scene, mask: Tensor) -> Injection | None:
    """Flips bits of one byte of one slot of ``mask`` in one source."""
    source = scene.source()
    if source is None:
        return None
    slot = scene.pick_intact(mask & source.has_bytes(torch.arange(len(mask), device=mask.device)), source)
    if slot is None:
        return None
    where = torch.tensor([slot], device=mask.device)
    content = read_bytes(source, where)
    content[0, scene.random.randrange(source.slot_bytes)] ^= scene.random.randrange(1, 256)
    write_bytes(source, where, content)
    return scene.injection((Kind.BYTES,), slots=(slot,), source=source.name)


def _real_kv_used(scene: Scene) -> Injection | None:
    mask = scene.sound & scene.read_mask
    # A state is rewritten by the forward that reads it, other slots are lost to what is written there.
    return _flip(scene, mask if scene.state.region.kind is RegionKind.STATE else mask & ~scene.write_mask)


def _real_kv_unused_cache(scene: Scene) -> Injection | None:
    return _flip(scene, scene.sound & ~scene.read_mask & ~scene.write_mask)


def _real_kv_post_forward(scene: Scene) -> Injection | None:
    return _flip(scene, scene.sound & scene.write_mask & (scene.state.records[:, STEP_WRITTEN] == scene.step))


def _req_to_token(scene: Scene) -> Injection | None:
    """Exchanges two entries of the table, if the exchange changes the content read: two slots may hold the same prefix
    of two requests."""
    state, table = scene.state, scene.table
    read = plan.elements(table, scene.reads, scene.rows.group)
    inside = (read >= 0) & (read < table.extent)
    candidates = (inside & ~torch.isin(read, plan.elements(table, scene.writes, scene.rows.group))).nonzero()[:, 0]
    flat = table.elements
    for _ in range(PICKS if len(candidates) > 1 else 0):
        i, j = (int(c) for c in candidates[torch.tensor([scene.random.randrange(len(candidates)) for _ in range(2)])])
        element, old, new = int(read[i]), int(flat[read[i]]), int(flat[read[j]])
        touched = ((read == element) & (scene.reads.row == scene.reads.row[i])).nonzero()[:, 0]
        places = plan.Places(scene.reads.row[touched], scene.reads.position[touched])
        before = see(state, *plan.lookup(state.region, table, places))
        flat[element] = new
        after = see(state, *plan.lookup(state.region, table, places))
        wrong = _misread(before, after, places.position)
        request = scene.request(int(places.row[0]))
        change = (request, int(places.position[0]), new)
        if not bool(wrong.any()) or change in scene.armed.seen:
            flat[element] = old
            continue
        scene.armed.seen.add(change)
        put_back = partial(_put_back, flat, element, (new, old))
        scene.pending.append(Pending(scene.canary, put_back, lasting=True))
        positions = [int(p) for p in places.position[wrong]]
        # A foreign prefix at the window's first place shows at the next one, whose link to it is broken.
        around = dict.fromkeys([*positions, *(p + 1 for p in positions)])
        kinds = (Kind.POSITION, Kind.TOKEN, Kind.PREFIX, Kind.UNWRITTEN, Kind.FREED)
        return scene.injection(kinds, positions=tuple(around), request=request)
    return None


def _misread(before: Seen, after: Seen, position: Tensor) -> Tensor:
    """Whether a place, read rightly before, is now read with another content, by the records."""
    judged = before.holds(position) & after.usable & (after.state != State.UNKNOWN)
    foreign = (after.hash != before.hash) & (after.hash != 0) & (before.hash != 0)
    return judged & (~after.holds(position) | foreign)


def _put_back(flat: Tensor, element: int, change: tuple[int, int]) -> None:
    """Unless the engine has written the entry since."""
    new, old = change
    if int(flat[element]) == new:
        flat[element] = old


def _lost_write(scene: Scene) -> Injection | None:
    """Keeps the old bytes of one request's new slots in one source and restores them after the forward. Only slots that
    get another token count: writing the same one again may leave the same bytes; and only slots with known bytes: not
    where another region in the same memory has left its own."""
    source = scene.source(Role.DATA)
    slot, status = scene.write_slots
    usable = status == Status.OK
    if source is None:
        return None
    record = see(scene.state, slot, status)
    token = scene.batch.token_ids[scene.rows.token(scene.writes)].long()
    other = (record.step_written == 0) | (record.token != token)
    known = (scene.state.fingerprints != 0).any(1)[torch.where(usable, slot, 0)]
    lost = usable & other & known & source.has_bytes(torch.where(usable, slot, 0))
    column = [s.name for s in scene.state.sources].index(source.name)
    lost[lost.clone()] = ~scene.broken(slot[lost])[:, column]
    rows = scene.writes.row[lost].unique()
    if not len(rows):
        return None
    row = int(rows[scene.random.randrange(len(rows))])
    chosen = lost & (scene.writes.row == row)
    slots = slot[chosen].unique()
    kept = read_bytes(source, slots)
    # By name, since the engine may have moved the region's bytes in between (`SlotEvents.rebind`).
    scene.pending.append(
        Pending(scene.canary, lambda: write_bytes(_named(scene.state, source.name), slots, kept), lasting=False)
    )
    return scene.injection(
        (Kind.LOST_WRITE,),
        slots=tuple(slots.tolist()),
        source=source.name,
        positions=tuple(scene.writes.position[chosen].tolist()),
        request=scene.request(row),
    )


def _named(state: RegionState, name: str) -> KVSource:
    return next(s for s in state.sources if s.name == name)


def _stray_write(scene: Scene) -> Injection | None:
    """A row just written by the forward lands a second time, on somebody else's slot."""
    source = scene.source()
    if source is None:
        return None
    present = source.has_bytes(torch.arange(scene.state.region.slots, device=scene.sound.device))
    for _ in range(PICKS):
        victim = scene.pick_intact(scene.sound & ~scene.write_mask & present, source)
        stray = scene.pick(scene.write_mask & present)
        if victim is None or stray is None:
            return None
        where = torch.tensor([victim, stray], device=scene.sound.device)
        content = read_bytes(source, where)
        if not torch.equal(content[0], content[1]):
            write_bytes(source, where[:1], content[1:])
            return scene.injection((Kind.BYTES,), slots=(victim,), source=source.name)
    return None


def _swap_pages(scene: Scene) -> Injection | None:
    size = _page_slots(scene)
    pages = scene.state.region.slots // size
    busy = scene.write_mask.clone()
    null = scene.state.region.null_range
    busy[null.start : null.stop] = True
    sound = scene.sound[: pages * size].view(pages, size)
    free = (sound.any(1) & ~busy[: pages * size].view(pages, size).any(1)).nonzero()[:, 0]
    sources = [s for s in scene.state.sources if scene.armed.spec.source in (None, s.name)]
    inside = torch.arange(size, device=sound.device)
    for _ in range(PICKS if len(free) > 1 else 0):
        first, second = (int(free[i]) for i in scene.random.sample(range(len(free)), 2))
        slots = torch.stack((first * size + inside, second * size + inside))
        if bool(scene.broken(slots[scene.sound[slots]]).any()):
            continue
        changed = torch.zeros_like(slots, dtype=torch.bool)
        for source in sources:
            there = source.has_bytes(slots).all(0)
            a, b = (read_bytes(source, s[there]) for s in slots)
            changed[:, there] |= (a != b).any(1)
            write_bytes(source, slots[0][there], b)
            write_bytes(source, slots[1][there], a)
        # Slots that hold nothing, or the same on both pages, show nothing.
        wrong = slots[changed & scene.sound[slots]].tolist()
        if not wrong:
            continue
        return scene.injection((Kind.BYTES,), slots=tuple(wrong), source=scene.armed.spec.source)
    return None


def _page_slots(scene: Scene) -> int:
    """Slots of a page: the pool's own, else the table's, if numbered in the region's slots."""
    region, table = scene.state.region, scene.table
    mapped = region.slot_map is not None or table.pool_page is not None or region.tokens_per_slot > 1
    return max(region.sources[0].page_size, 1 if mapped else table.page_size)


def _next_token_swap(scene: Scene) -> Injection | None:
    """Swaps two input tokens known better by the requests: never without `BatchView.expected_tokens`."""
    batch, tokens = scene.batch, scene.batch.token_ids
    index = scene.rows.token(scene.writes)
    own = expected_tokens(batch, scene.rows, scene.writes)
    known = ((own >= 0) & (own == tokens[index]) & (scene.write_slots[1] == Status.OK)).nonzero()[:, 0]
    for _ in range(PICKS if len(known) > 1 else 0):
        i, j = (int(known[n]) for n in scene.random.sample(range(len(known)), 2))
        if int(own[i]) == int(own[j]):
            continue
        tokens[index[[i, j]]] = tokens[index[[j, i]]]
        places = [i, j]
        return scene.injection((Kind.WRITE_INPUT,), positions=tuple(scene.writes.position[places].tolist()))
    return None


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to break things: when, how, and in words. ``inject`` returns None where there is nothing to break."""

    moment: FaultMoment
    inject: Callable[[Scene], Injection | None]
    what: str


FAULTS: dict[str, Fault] = {
    "req_to_token": Fault("pre_forward", _req_to_token, "a table entry of a running request points to another slot"),
    "real_kv_used": Fault("pre_forward", _real_kv_used, "bits of a slot flip that the forward is about to read"),
    "real_kv_unused_cache": Fault("pre_forward", _real_kv_unused_cache, "bits of a cached slot flip that nobody reads"),
    "real_kv_post_forward": Fault("recorded", _real_kv_post_forward, "bits of a slot flip that was just written"),
    "lost_write": Fault("pre_forward", _lost_write, "one layer's store of a request's new tokens never happens"),
    "stray_write": Fault("post_forward", _stray_write, "one layer's store lands on somebody else's slot as well"),
    "swap_pages": Fault("pre_forward", _swap_pages, "two pages exchange their bytes"),
    "next_token_swap": Fault("pre_forward", _next_token_swap, "two tokens of the forward's input are exchanged"),
}
"""Every fault by name; the first four and the last one are named as in SGLang."""
