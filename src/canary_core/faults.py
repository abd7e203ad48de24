"""Fault injection: breaks the engine's own memory, tables and inputs on purpose, to prove that the alarm works.

Off unless ``CANARY_FAULTS`` is set. Every corruption is done where a broken engine would do it: in the tensors that
attention reads, through the addresses of their `KVSource`. Slots are picked from Canary's records, with host reads, so
that a fault never races the forward's own writes nor hits the null slot; that costs time and is for self-tests only.
Nothing is injected while a graph is captured.

Syntax: faults separated by ``;``, each a name, then ``:`` and ``key=value`` pairs separated by commas, e.g.
``real_kv_used:probability=0.01,warmup=50,source=v.3;lost_write``. Names are those of `FAULTS`, keys those of
`FaultSpec`.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal

import pluggy
import torch
from torch import Tensor

from canary_core.batch import BatchView, SlotTable
from canary_core.errors import ConfigError
from canary_core.events import Event
from canary_core.hookspecs import hookimpl
from canary_core.records import POSITION, STATES, STEP_WRITTEN, Clock, Kind, State, Status
from canary_core.reference import plan
from canary_core.reference.check import Seen, expected_tokens, see
from canary_core.region import KVSource, Role
from canary_core.state import RegionState
from canary_core.violation import Violation

if TYPE_CHECKING:
    from canary_core.canary import Canary

Moment = Literal["pre_forward", "post_forward", "recorded"]

PICKS = 32
"""How often a fault draws a pair of slots before it gives up for this forward."""


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """One fault to inject.

    ``probability`` per forward, after ``warmup`` forwards; ``count`` injections in all, 0 for no limit. ``region`` and
    ``source`` (``half.layer``, e.g. ``v.3``) aim it; None for any.
    """

    fault: str
    probability: float = 1.0
    warmup: int = 0
    count: int = 1
    region: str | None = None
    source: str | None = None

    @classmethod
    def parse(cls, text: str) -> "FaultSpec":
        """``name`` or ``name:key=value,...``. Raises `ConfigError`."""
        name, _, rest = text.partition(":")
        name = name.strip()
        if name not in FAULTS:
            raise ConfigError(f"CANARY_FAULTS: unknown fault {name!r}; the faults are {', '.join(FAULTS)}")
        known = [f.name for f in fields(cls) if f.name != "fault"]
        values: dict[str, str] = {}
        for pair in filter(None, (p.strip() for p in rest.split(","))):
            key, equals, value = (part.strip() for part in pair.partition("="))
            if key not in known or not equals or not value:
                raise ConfigError(
                    f"CANARY_FAULTS: {name} has {pair!r}; write key=value with a key of {', '.join(known)}"
                )
            if key in values:
                raise ConfigError(f"CANARY_FAULTS: {name} has {key} twice; give it once, or the fault twice")
            values[key] = value
        spec = cls(
            name,
            _number(name, "probability", values, 1.0),
            int(_number(name, "warmup", values, 0)),
            int(_number(name, "count", values, 1)),
            values.get("region"),
            values.get("source"),
        )
        if spec.probability > 1:
            raise ConfigError(f"CANARY_FAULTS: {name} has probability={spec.probability:g}; it must be 0 to 1")
        return spec


@dataclass(frozen=True, slots=True)
class Injection:
    """What was broken, and how a finding about it looks.

    ``slots`` are those whose bytes are wrong or whose entries are misread (empty: found by position), ``positions``
    those of the request that are affected, ``source`` None where all of the region are. ``step`` is the forward,
    counted from 1.
    """

    fault: str
    region: str
    step: int
    kinds: tuple[Kind, ...]
    slots: tuple[int, ...] = ()
    source: str | None = None
    positions: tuple[int, ...] = ()
    request: str | None = None

    def explains(self, violation: Violation) -> bool:
        """Whether ``violation`` names this very fault, not one of its consequences nor another one. What isn't about
        bytes must be found in the same forward, since the fault is gone after it."""
        in_time = violation.step >= self.step if Kind.BYTES in self.kinds else violation.step == self.step
        return (
            in_time
            and violation.kind in self.kinds
            and violation.region == self.region
            and self.source in (None, violation.source)
            and (not self.slots or violation.slot in self.slots)
            and (not self.positions or violation.position in self.positions)
            and self.request in (None, violation.request)
        )

    def fields(self) -> dict[str, object]:
        """The known fields as plain values, for an event or JSON; ``slot`` and ``position`` are the first ones."""
        out: dict[str, object] = {"fault": self.fault, "region": self.region, "step": self.step}
        if self.slots:
            out |= {"slot": self.slots[0], "slots": list(self.slots)}
        if self.positions:
            out["position"] = self.positions[0]
        for name in ("source", "request"):
            if getattr(self, name) is not None:
                out[name] = getattr(self, name)
        return {**out, "what": FAULTS[self.fault].what}


class FaultInjector:
    """A plugin that injects ``specs``; `enable` registers it for `CanaryConfig.faults`. The same seed, specs and
    traffic give the same faults; each spec draws from a stream of its own.

    ``injections`` are those done so far, in order, each also told as a ``fault_injected`` event. A fault that finds
    nothing to break tries again in the next forward; so does one whose slot the engine drops before another forward
    begins (``fault_moot``): there is nothing left that anyone could read. One that was never injected is told as
    ``fault_not_injected`` when the Canary is closed.
    """

    def __init__(self, specs: list[FaultSpec], seed: int = 0) -> None:
        self.injections: list[Injection] = []
        self._armed = [_Armed(s, random.Random(f"{seed}/{i}/{s.fault}")) for i, s in enumerate(specs)]
        self._pending: list[_Pending] = []
        self._unseen: list[_Unseen] = []
        self._hit: dict[tuple[str, int], int] = {}

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> "FaultInjector":
        """From the syntax of ``CANARY_FAULTS``. Raises `ConfigError` naming the known faults and keys."""
        return cls([FaultSpec.parse(part) for part in text.split(";") if part.strip()], seed)

    @hookimpl
    def canary_attached(self, canary: "Canary") -> None:
        """Tells of faults that this pool has no place for."""
        for armed in self._armed:
            spec = armed.spec
            regions = [s for s in canary.states.values() if spec.region in (None, s.region.name)]
            known = sorted({s.name for r in regions for s in r.sources})
            if not regions or (spec.source is not None and spec.source not in known):
                reason = (
                    f"there is no source {spec.source!r}; the guarded ones are {', '.join(known) or 'none'}"
                    if regions
                    else f"there is no region {spec.region!r}; the regions are {', '.join(canary.states)}"
                )
                canary.tell(Event("fault_not_injected", "warning", {"fault": spec.fault, "reason": reason}))

    @hookimpl
    def canary_pre_forward(self, canary: "Canary", batch: BatchView) -> None:
        """Injects what a forward will find."""
        if _capturing(canary):
            return
        # Left over where a forward raised: what was spared from the write is long stale, a table entry may still stand.
        self._restore(canary, lasting=True)
        self._forget_moot(canary, "the slot was dropped before another forward began")
        self._inject("pre_forward", canary, batch)

    @hookimpl
    def canary_post_forward(self, canary: "Canary", batch: BatchView) -> None:
        """Takes back what lasts one forward, and injects what went wrong within it."""
        if _capturing(canary):
            return
        self._restore(canary, lasting=False)
        self._inject("post_forward", canary, batch)

    @hookimpl
    def canary_recorded(self, canary: "Canary", batch: BatchView) -> None:
        """Injects what happens to slots after they were recorded."""
        if not _capturing(canary):
            self._inject("recorded", canary, batch)

    @hookimpl
    def canary_detached(self, canary: "Canary") -> None:
        """Tells of faults that never happened, so that a self-test without a fault isn't taken for a passed one."""
        self._restore(canary, lasting=True)
        self._forget_moot(canary, "no other forward followed", all_of_them=True)
        for armed in self._armed:
            if armed.injected == 0 and armed.spec.probability > 0:
                reason = (
                    f"no candidate in {armed.tries} forwards"
                    if armed.tries
                    else f"not due in {canary.forwards} forwards; check warmup and probability"
                )
                canary.tell(Event("fault_not_injected", "warning", {"fault": armed.spec.fault, "reason": reason}))

    def _inject(self, moment: Moment, canary: "Canary", batch: BatchView) -> None:
        for armed in self._armed:
            fault = FAULTS[armed.spec.fault]
            if fault.moment != moment or not armed.due(canary.forwards):
                continue
            names = [n for n in batch.tables if n in canary.states and armed.spec.region in (None, n)]
            armed.random.shuffle(names)
            for name in names:
                scene = Scene(canary, batch, name, armed, self._hit)
                injection = fault.inject(scene)
                if injection is None:
                    continue
                armed.done()
                self._pending += scene.pending
                self.injections.append(injection)
                if moment == "recorded":
                    self._unseen.append(_Unseen(canary, armed, injection))
                canary.tell(Event("fault_injected", "warning", injection.fields()))
                break
            else:
                armed.tries += 1

    def _forget_moot(self, canary: "Canary", reason: str, all_of_them: bool = False) -> None:
        ours = [u for u in self._unseen if u.canary is canary]
        self._unseen = [u for u in self._unseen if u.canary is not canary]
        for unseen in ours:
            if all_of_them or not unseen.stands():
                self.injections.remove(unseen.injection)
                unseen.armed.injected -= 1
                unseen.armed.tries += 1
                canary.tell(Event("fault_moot", "info", {"reason": reason, **unseen.injection.fields()}))

    def _restore(self, canary: "Canary", lasting: bool) -> None:
        ours = [p for p in self._pending if p.canary is canary]
        self._pending = [p for p in self._pending if p.canary is not canary]
        for pending in reversed(ours):
            if pending.lasting or not lasting:
                pending.restore()


def enable(text: str, seed: int, hooks: pluggy.PluginManager) -> None:
    """Registers a `FaultInjector` for ``text`` as plugin ``faults``, once per plugin manager; without text does
    nothing. Raises `ConfigError` for a bad text."""
    if text.strip() and not hooks.has_plugin("faults"):
        hooks.register(FaultInjector.parse(text, seed), name="faults")


@dataclass(slots=True)
class _Armed:
    """A spec with its random stream and what became of it."""

    spec: FaultSpec
    random: random.Random
    injected: int = 0
    tries: int = 0
    seen: set[object] = field(default_factory=set)
    """What was done before and, done again, would be reported as a repetition only."""
    _drawn: bool = False

    def due(self, forward: int) -> bool:
        """Whether to inject in this forward; once drawn, a fault stays due until it is done."""
        if forward <= self.spec.warmup or (self.spec.count and self.injected >= self.spec.count):
            return False
        self._drawn = self._drawn or self.random.random() < self.spec.probability
        return self._drawn

    def done(self) -> None:
        self._drawn = False
        self.injected += 1


@dataclass(frozen=True, slots=True)
class _Pending:
    """What to take back after the forward; ``lasting``: also if that forward never ended."""

    canary: "Canary"
    restore: Callable[[], None]
    lasting: bool


@dataclass(frozen=True, slots=True)
class _Unseen:
    """A fault that no check has had the chance to see yet."""

    canary: "Canary"
    armed: _Armed
    injection: Injection

    def stands(self) -> bool:
        """Whether its slots still hold what was broken."""
        state = self.canary.states[self.injection.region]
        records = state.records[list(self.injection.slots)]
        written = records[:, POSITION] % STATES == State.WRITTEN
        return bool((written & (records[:, STEP_WRITTEN] == self.injection.step)).all())


@dataclass(eq=False)
class Scene:
    """One forward in one region, as a fault sees it. Masks are bool ``[slots]``."""

    canary: "Canary"
    batch: BatchView
    name: str
    armed: _Armed
    hit: dict[tuple[str, int], int]
    """(region, slot) → the step written of the content that was already broken there: flipping it once more could
    repair it."""
    pending: list[_Pending] = field(default_factory=list)

    @property
    def state(self) -> RegionState:
        """Canary's memory of the region."""
        return self.canary.states[self.name]

    @property
    def table(self) -> SlotTable:
        """The engine's table of the region."""
        return self.batch.tables[self.name]

    @property
    def random(self) -> random.Random:
        """The fault's own stream."""
        return self.armed.random

    @cached_property
    def step(self) -> int:
        """This forward's number: its check counts it, so before the check it is the one after the last."""
        clock = self.state.shared.clock.tolist()
        before_check = FAULTS[self.armed.spec.fault].moment == "pre_forward"
        return int(clock[Clock.STEP] + 1 if before_check else clock[Clock.NEXT])

    @cached_property
    def rows(self) -> plan.Rows:
        """The forward's ranges."""
        return plan.rows(self.state.region, self.batch, self.table)

    @cached_property
    def reads(self) -> plan.Places:
        """All places that the forward reads."""
        return plan.expand(self.rows.read_first, self.rows.prefix)

    @cached_property
    def writes(self) -> plan.Places:
        """All places that the forward stores."""
        return plan.expand(self.rows.stored_first, self.rows.prefix + self.rows.new)

    @cached_property
    def write_slots(self) -> tuple[Tensor, Tensor]:
        """Slot and status of each of `writes`."""
        index = self.rows.token(self.writes)
        return plan.write_slots(self.state.region, self.table, self.writes, index)

    @cached_property
    def read_mask(self) -> Tensor:
        """Slots that this forward reads."""
        return self._mask(*plan.lookup(self.state.region, self.table, self.reads))

    @cached_property
    def write_mask(self) -> Tensor:
        """Slots that this forward writes."""
        return self._mask(*self.write_slots)

    @cached_property
    def sound(self) -> Tensor:
        """Slots with recorded content that no fault has broken yet."""
        records = self.state.records
        mask = records[:, POSITION] % STATES == State.WRITTEN
        for (name, slot), step in self.hit.items():
            if name == self.name and int(records[slot, STEP_WRITTEN]) == step:
                mask[slot] = False
        if self.state.region.null_slot is not None:
            mask[self.state.region.null_slot] = False
        return mask

    def source(self, *roles: Role) -> KVSource | None:
        """One of the guarded sources that the fault aims at, at random; None if there is none."""
        wanted = self.armed.spec.source
        fit = [s for s in self.state.sources if (s.name == wanted if wanted else not roles or s.role in roles)]
        return self.random.choice(fit) if fit else None

    def pick(self, mask: Tensor) -> int | None:
        """One slot of ``mask`` at random."""
        slots = mask.nonzero()[:, 0]
        return int(slots[self.random.randrange(len(slots))]) if len(slots) else None

    def broke(self, *slots: int) -> None:
        """Notes that the content of ``slots`` is broken now."""
        for slot in slots:
            self.hit[self.name, slot] = int(self.state.records[slot, STEP_WRITTEN])

    def injection(self, kinds: tuple[Kind, ...], **about: object) -> Injection:
        """An `Injection` of this fault, now and here."""
        return Injection(self.armed.spec.fault, self.name, self.step, kinds, **about)  # type: ignore[arg-type]

    def request(self, row: int) -> str | None:
        """Name of the request in a batch row."""
        return self.canary.writers.name(int(self.batch.writers[row]))

    def _mask(self, slot: Tensor, status: Tensor) -> Tensor:
        mask = torch.zeros(self.state.region.slots, dtype=torch.bool, device=slot.device)
        mask[slot[status == Status.OK]] = True
        return mask


def read_bytes(source: KVSource, slots: Tensor) -> Tensor:
    """The bytes of ``slots`` (int64 ``[n]``): uint8 ``[n, source.slot_bytes]``."""
    flat, index = _places_of(source, slots)
    return flat[index]


def write_bytes(source: KVSource, slots: Tensor, content: Tensor) -> None:
    """Overwrites the bytes of ``slots`` with ``content``, as `read_bytes` gives them."""
    flat, index = _places_of(source, slots)
    flat[index] = content


def _places_of(source: KVSource, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The source's whole storage as bytes, and the index of each byte of each slot in it."""
    storage = source.tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=slots.device).set_(storage, 0, (storage.nbytes(),), (1,))
    start = source.address - storage.data_ptr()
    page, inside = slots // source.page_size, slots % source.page_size
    first = start + page * source.page_stride_bytes + inside * source.slot_stride_bytes
    chunk = torch.arange(source.chunks, device=slots.device) * source.chunk_stride_bytes
    byte = torch.arange(source.chunk_bytes, device=slots.device)
    index = first[:, None, None] + chunk[:, None] + byte
    return flat, index.view(len(slots), source.slot_bytes)


def _present(source: KVSource, slots: Tensor) -> Tensor:
    present = source.page_size if source.present is None else source.present
    return slots % source.page_size < present


def _flip(scene: Scene, mask: Tensor) -> Injection | None:
    """Flips bits of one byte of one slot of ``mask`` in one source."""
    source = scene.source()
    if source is None:
        return None
    slot = scene.pick(mask & _present(source, torch.arange(len(mask), device=mask.device)))
    if slot is None:
        return None
    where = torch.tensor([slot], device=mask.device)
    content = read_bytes(source, where)
    content[0, scene.random.randrange(source.slot_bytes)] ^= scene.random.randrange(1, 256)
    write_bytes(source, where, content)
    scene.broke(slot)
    return scene.injection((Kind.BYTES,), slots=(slot,), source=source.name)


def _real_kv_used(scene: Scene) -> Injection | None:
    return _flip(scene, scene.sound & scene.read_mask & ~scene.write_mask)


def _real_kv_unused_cache(scene: Scene) -> Injection | None:
    return _flip(scene, scene.sound & ~scene.read_mask & ~scene.write_mask)


def _real_kv_post_forward(scene: Scene) -> Injection | None:
    return _flip(scene, scene.sound & scene.write_mask & (scene.state.records[:, STEP_WRITTEN] == scene.step))


def _req_to_token(scene: Scene) -> Injection | None:
    """Only an exchange that changes what is read counts: two slots may hold the same prefix of two requests."""
    state, table = scene.state, scene.table
    read = _elements(table, scene.rows, scene.reads)
    inside = _inside(table, read)
    candidates = (inside & ~torch.isin(read, _elements(table, scene.rows, scene.writes))).nonzero()[:, 0]
    flat = _flat(table)
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
        scene.pending.append(_Pending(scene.canary, put_back, lasting=True))
        positions = [int(p) for p in places.position[wrong]]
        # A foreign prefix at the window's first place shows at the next one, whose link to it is broken.
        around = dict.fromkeys([*positions, *(p + 1 for p in positions)])
        kinds = (Kind.POSITION, Kind.TOKEN, Kind.PREFIX, Kind.UNWRITTEN, Kind.FREED)
        return scene.injection(kinds, positions=tuple(around), request=request)
    return None


def _misread(before: Seen, after: Seen, position: Tensor) -> Tensor:
    """Where a place that was read as it should be is now read with another content, by what records say."""
    judged = before.holds(position) & after.usable & (after.state != State.UNKNOWN)
    foreign = (after.hash != before.hash) & (after.hash != 0) & (before.hash != 0)
    return judged & (~after.holds(position) | foreign)


def _flat(table: SlotTable) -> Tensor:
    """All elements of a table, as `SlotTable` numbers them."""
    entries = table.entries
    extent = (entries.shape[0] - 1) * entries.stride(0) + entries.shape[1] if entries.numel() else 0
    return entries.as_strided((extent,), (1,))


def _elements(table: SlotTable, rows: plan.Rows, places: plan.Places) -> Tensor:
    """Number of each place's table element."""
    column = plan.last_token(places.position, rows.group)
    column = column % table.ring_slots if table.ring_slots else column
    first = places.row if table.rows is None else table.rows[places.row].long()
    return first * table.entries.stride(0) + column // table.page_size


def _inside(table: SlotTable, elements: Tensor) -> Tensor:
    return (elements >= 0) & (elements < len(_flat(table)))


def _put_back(flat: Tensor, element: int, change: tuple[int, int]) -> None:
    """Unless the engine has written the entry since."""
    new, old = change
    if int(flat[element]) == new:
        flat[element] = old


def _lost_write(scene: Scene) -> Injection | None:
    """Keeps the old bytes of one request's new slots in one source and puts them back after the forward. Only slots
    that get another token count: writing the same one again may leave the same bytes."""
    source = scene.source(Role.DATA)
    slot, status = scene.write_slots
    usable = status == Status.OK
    if source is None:
        return None
    record = see(scene.state, slot, status)
    token = scene.batch.token_ids[scene.rows.token(scene.writes)].long()
    other = (record.step_written == 0) | ((record.state == State.WRITTEN) & (record.token != token))
    lost = usable & other & _present(source, torch.where(usable, slot, 0))
    rows = scene.writes.row[lost].unique()
    if not len(rows):
        return None
    row = int(rows[scene.random.randrange(len(rows))])
    chosen = lost & (scene.writes.row == row)
    slots = slot[chosen].unique()
    kept = read_bytes(source, slots)
    # By name, since the engine may have moved the region's bytes in between (`Canary.rebind`).
    scene.pending.append(
        _Pending(scene.canary, lambda: write_bytes(_named(scene.state, source.name), slots, kept), lasting=False)
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
    """A row that the forward has just written lands a second time, on somebody else's slot."""
    source = scene.source()
    if source is None:
        return None
    present = _present(source, torch.arange(scene.state.region.slots, device=scene.sound.device))
    for _ in range(PICKS):
        victim = scene.pick(scene.sound & ~scene.write_mask & present)
        stray = scene.pick(scene.write_mask & present)
        if victim is None or stray is None:
            return None
        where = torch.tensor([victim, stray], device=scene.sound.device)
        content = read_bytes(source, where)
        if not torch.equal(content[0], content[1]):
            write_bytes(source, where[:1], content[1:])
            scene.broke(victim)
            return scene.injection((Kind.BYTES,), slots=(victim,), source=source.name)
    return None


def _swap_pages(scene: Scene) -> Injection | None:
    size = _page_slots(scene)
    pages = scene.state.region.slots // size
    busy = scene.write_mask.clone()
    if scene.state.region.null_slot is not None:
        busy[scene.state.region.null_slot] = True
    sound = scene.sound[: pages * size].view(pages, size)
    free = (sound.any(1) & ~busy[: pages * size].view(pages, size).any(1)).nonzero()[:, 0]
    sources = [s for s in scene.state.sources if scene.armed.spec.source in (None, s.name)]
    inside = torch.arange(size, device=sound.device)
    for _ in range(PICKS if len(free) > 1 else 0):
        first, second = (int(free[i]) for i in scene.random.sample(range(len(free)), 2))
        slots = torch.stack((first * size + inside, second * size + inside))
        changed = torch.zeros_like(slots, dtype=torch.bool)
        for source in sources:
            there = _present(source, slots).all(0)
            a, b = (read_bytes(source, s[there]) for s in slots)
            changed[:, there] |= (a != b).any(1)
            write_bytes(source, slots[0][there], b)
            write_bytes(source, slots[1][there], a)
        # Slots that hold nothing, or the same on both pages, show nothing.
        wrong = slots[changed & scene.sound[slots]].tolist()
        if not wrong:
            continue
        scene.broke(*slots.flatten().tolist())
        return scene.injection((Kind.BYTES,), slots=tuple(wrong), source=scene.armed.spec.source)
    return None


def _page_slots(scene: Scene) -> int:
    """Slots of a page: the pool's own, else the table's if it counts in this region's slots."""
    region, table = scene.state.region, scene.table
    mapped = region.slot_map is not None or table.pool_page is not None or region.tokens_per_slot > 1
    return max(region.sources[0].page_size, 1 if mapped else table.page_size)


def _next_token_swap(scene: Scene) -> Injection | None:
    """Swaps two input tokens that the requests know better: without `BatchView.expected_tokens` none does."""
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

    moment: Moment
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


def _number(fault: str, key: str, values: dict[str, str], default: float) -> float:
    if key not in values:
        return default
    whole = key != "probability"
    try:
        number = int(values[key]) if whole else float(values[key])
    except ValueError:
        number = -1
    if not number >= 0:
        raise ConfigError(
            f"CANARY_FAULTS: {fault} has {key}={values[key]}; it must be "
            f"{'a whole number of at least 0' if whole else 'a number from 0 to 1'}"
        )
    return number


def _capturing(canary: "Canary") -> bool:
    """Faults read on the host, which a graph under capture forbids."""
    device = next(iter(canary.regions.values())).device
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
