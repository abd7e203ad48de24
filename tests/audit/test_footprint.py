"""The footprint audit finds what an adapter leaves out, by the engine's own memory, and names it."""

import random

import pytest
import torch

from canary_adapters import LayerTensors, PagedPool, stacked_layers
from canary_core import (
    AttachError,
    BatchView,
    Footprint,
    FootprintAudit,
    KVSource,
    MisuseError,
    Region,
    RegionKind,
    SlotTable,
    Uncovered,
)
from canary_core.watchers.audit import slot_bytes, snapshot
from canary_core.watchers.audit.footprint import SURE_SLOTS

PAGES, PAGE, HEADS, DIM = 16, 4, 2, 8


class Engine:
    """A paged engine of two layers, page 0 is padding. It writes what the view of its adapter should say."""

    def __init__(self, seed: int = 0, shape: tuple[int, ...] = (PAGES, PAGE, HEADS, DIM), layers: int = 2) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.pool = {f"{half}.{layer}": torch.zeros(shape) for layer in range(layers) for half in "kv"}
        self.fill()
        self.table = torch.arange(1, 13, dtype=torch.int32).view(2, 6)  # two requests of six pages each
        self.prefix, self.new = [0, 5], [6, 1]

    def fill(self) -> None:
        for tensor in self.pool.values():
            tensor.copy_(torch.rand(tensor.shape, generator=self.random))

    def slots(self) -> torch.Tensor:
        rows = zip(self.table.tolist(), self.prefix, self.new, strict=True)
        return torch.tensor([row[p // PAGE] * PAGE + p % PAGE for row, old, n in rows for p in range(old, old + n)])

    def forward(self, slots: torch.Tensor | None = None) -> None:
        slots = self.slots() if slots is None else slots
        for tensor in self.pool.values():
            tensor[slots // PAGE, slots % PAGE] = torch.rand(len(slots), *tensor.shape[2:], generator=self.random)

    def view(self, **changes) -> BatchView:
        said = dict(
            prefix_lens=torch.tensor(self.prefix),
            new_lens=torch.tensor(self.new),
            token_ids=torch.arange(sum(self.new)),
            writers=torch.tensor([0, 1]),
            tables={"full": SlotTable(self.table, page_size=PAGE)},
        )
        return BatchView(**{**said, **changes})

    def region(self, null_slot: int | None = 0, leave_out: str = "") -> Region:
        return self.of({n: t for n, t in self.pool.items() if n != leave_out}, null_slot)

    def of(self, tensors: dict[str, torch.Tensor], null_slot: int | None = 0) -> Region:
        layers = [LayerTensors(int(n[2:]), {n[0]: t}) for n, t in tensors.items()]
        return PagedPool("full", layers, null_slot=null_slot).regions()[0]


def audited(engine: Engine, region: Region, view: BatchView | None, forward=None, **options) -> Footprint:
    """One forward, audited in the strict way unless ``options`` say otherwise."""
    audit = FootprintAudit(engine.pool, [region], **{"strict": True, **options})
    audit.begin()
    audit.claim(view)
    (forward or engine.forward)()
    return audit.end()


def the_problem(footprint: Footprint) -> str:
    """The only one."""
    (problem,) = footprint.problems
    return problem


def test_a_right_adapter_passes():
    """Every byte that changed is claimed, and every claimed slot changed; padding may, too."""
    engine = Engine()
    found = audited(
        engine, engine.region(), engine.view(), lambda: engine.forward(torch.cat((engine.slots(), torch.tensor([0]))))
    )
    assert found.passed
    assert found.problems == ()
    assert found.compared_bytes == 4 * PAGES * PAGE * HEADS * DIM * 4
    assert (found.unclaimed_bytes, found.unchanged, found.written_slots) == (0, {}, {"full": 7})
    assert found.changed_bytes == found.claimed_bytes > 0.9 * 8 * 4 * HEADS * DIM * 4


def test_a_tensor_that_nobody_describes_is_named_by_the_engines_name():
    """V of layer 1 is missing."""
    engine = Engine()
    found = audited(engine, engine.region(leave_out="v.1"), engine.view())
    assert "of 'v.1' (shape [16, 4, 2, 8]) that no region describes, nor anything else of it" in the_problem(found)
    assert 0 < found.unclaimed_bytes <= 7 * HEADS * DIM * 4


def test_half_of_the_heads_is_named_by_its_dimension():
    """The adapter gave the first head alone."""
    engine = Engine()
    tensors = {n: t[:, :, :1] if n == "v.1" else t for n, t in engine.pool.items()}
    problem = the_problem(audited(engine, engine.of(tensors), engine.view()))
    assert "of 'v.1' (shape [16, 4, 2, 8]) that no region describes: dim 2 (size 2): index 1 only; is half" in problem


def test_a_stacked_half_is_named_by_its_dimension():
    """K and V in one tensor, of which K alone is described."""
    engine = Engine()
    engine.pool = {"kv": torch.rand(2, PAGES, PAGE, HEADS, DIM)}
    keys = PagedPool("full", [LayerTensors(0, {"k": engine.pool["kv"][0]})], null_slot=0).regions()[0]

    def forward() -> None:
        slots = engine.slots()
        engine.pool["kv"][:, slots // PAGE, slots % PAGE] += 1.0

    problem = the_problem(audited(engine, keys, engine.view(), forward))
    assert "dim 0 (size 2): index 1 only; are pages, or one of the parts that are stacked there" in problem
    both = PagedPool("full", stacked_layers([engine.pool["kv"]]), null_slot=0).regions()[0]
    assert audited(engine, both, engine.view(), forward).unclaimed_bytes == 0


def test_a_copy_of_the_pool_is_none_of_the_engines_memory():
    """The adapter cloned a tensor; the engine's own one is then described by nobody."""
    engine = Engine()
    tensors = {n: t.clone() if n == "k.1" else t for n, t in engine.pool.items()}
    elsewhere, unclaimed = audited(engine, engine.of(tensors), engine.view()).problems
    assert elsewhere.startswith("k.1 of region 'full' points at memory that is none of the engine's tensors")
    assert "of 'k.1' (shape [16, 4, 2, 8]) that no region describes" in unclaimed


def test_a_source_that_never_changes_is_named():
    """The engine names the copy as well, so that only its standing still gives it away."""
    engine = Engine()
    copy = engine.pool["k.1"].clone()
    region = engine.of({n: copy if n == "k.1" else t for n, t in engine.pool.items()})
    audit = FootprintAudit({**engine.pool, "spare": copy}, [region], strict=True)
    audit.begin()
    audit.claim(engine.view())
    engine.forward()
    problems = audit.end().problems
    assert any("'k.1'" in p for p in problems)
    assert any(
        p.startswith("nothing of source k.1 of region 'full' changed in 7 written slots, while k.0, v.0, v.1 did")
        for p in problems
    )


def test_an_unknown_null_block_is_asked_for():
    """Padding went to page 0 and nobody said that it is padding: a slot, or a whole page of them."""
    engine = Engine()
    one = audited(
        engine,
        engine.region(None),
        engine.view(),
        lambda: engine.forward(torch.cat((engine.slots(), torch.tensor([0])))),
    )
    assert the_problem(one) == (
        "slot 0 (page 0) of region 'full' was written and no request writes there: is it the null slot? "
        "Say Region(null_slot=0), or null_slots=4 from 0 on if all of the page is padding"
    )
    page = audited(
        engine, engine.region(0), engine.view(), lambda: engine.forward(torch.cat((engine.slots(), torch.arange(4))))
    )
    assert "slots 1 to 3 (page 0)" in the_problem(page)
    assert "Say Region(null_slot=0, null_slots=4)" in the_problem(page)


@pytest.mark.parametrize("empty", [False, True])
def test_a_view_that_names_nothing_is_told(empty):
    """None, or one without new tokens."""
    engine = Engine()
    view = engine.view(new_lens=torch.zeros(2, dtype=torch.int64)) if empty else None
    problem = the_problem(audited(engine, engine.region(), view))
    assert problem.startswith("the view named no written slot, yet ")
    assert "in slots 4 to 9, 33 (pages 1, 2, 8) of region 'full', in k.0, v.0, k.1, v.1" in problem


def test_a_prefix_that_is_one_too_long_is_told():
    """What should have changed did not, what changed is not named, all one slot further."""
    engine = Engine()
    engine.prefix, engine.new = [0, 5], [0, 1]
    view = engine.view(prefix_lens=torch.tensor([0, 6]), token_ids=torch.arange(1))
    unnamed, still = audited(engine, engine.region(), view).problems
    assert "which the view does not name as written; the slots that it names lie +1 slots from there" in unnamed
    assert still.startswith("nothing changed in the 1 slot of region 'full' that the view names as written (34)")


def test_a_view_made_after_the_forward_is_told():
    """Nothing changes any more between begin and end."""
    engine = Engine()
    problem = the_problem(audited(engine, engine.region(), engine.view(), lambda: None))
    assert problem.startswith("nothing changed in the 7 slots of region 'full' that the view names as written")


def test_some_slots_that_stay_the_same_are_named():
    """One layer's store lost a token."""
    engine = Engine()

    def forward() -> None:
        kept = engine.pool["v.0"][1, 2].clone()
        engine.forward()
        engine.pool["v.0"][1, 2] = kept

    found = audited(engine, engine.region(), engine.view(), forward)
    assert "source v.0 of region 'full' stayed the same in 1 of 7 written slots (6)" in the_problem(found)
    assert found.unchanged == {"full/v.0": 1}


def test_write_slots_that_the_region_has_not_are_told():
    """The numbers of another pool."""
    engine = Engine()
    table = SlotTable(engine.table, page_size=PAGE, write_slots=torch.cat((engine.slots()[:-1], torch.tensor([900]))))
    outside, unnamed = audited(engine, engine.region(), engine.view(tables={"full": table})).problems
    assert "1 written slot that region 'full' does not have (it has 0 to 63): 900" in outside
    assert "in slot 33 (page 8) of region 'full'" in unnamed


def test_slots_that_events_name_may_change():
    """Told within the forward or before it; of the region, by number or all."""
    engine = Engine()
    more = torch.tensor([50, 51])
    audit = FootprintAudit(engine.pool, [engine.region()], strict=True)
    audit.claim_slots("full", more[:1])
    for told in (more[1:], torch.empty(0, dtype=torch.int64)):
        audit.begin()
        audit.claim(engine.view())
        audit.claim_slots("full", told)
        engine.forward(torch.cat((engine.slots(), more)))
        found = audit.end()
        assert found.passed == bool(len(told)), "a claim holds for one forward"
    assert "slots 50, 51 (page 12)" in the_problem(found)
    audit.begin()
    audit.claim_slots("full", None)
    engine.forward(more)
    assert audit.end().passed


def test_what_is_left_out_on_purpose_may_change():
    """An `Uncovered` that says where it is."""
    engine = Engine()
    engine.pool["state"] = torch.zeros(4, 6)
    left_out = Uncovered("state", 8, "not KV", engine.pool["state"][1:2, :2])

    def forward() -> None:
        engine.pool["state"][1:2, :columns] += 1.0
        slots = engine.slots()
        for name in ("k.0", "v.0", "k.1", "v.1"):
            engine.pool[name][slots // PAGE, slots % PAGE] += 1.0

    region = engine.of({n: t for n, t in engine.pool.items() if n != "state"})
    columns = 2
    assert audited(engine, region, engine.view(), forward, uncovered=[left_out]).passed
    columns = 3
    found = audited(engine, region, engine.view(), forward, uncovered=[left_out])
    assert "'state' (shape [4, 6])" in the_problem(found)


def test_in_a_running_engine_equal_values_are_not_told():
    """The same tokens again in the same slots: nothing changes, or the deeper layers alone."""
    engine = Engine()
    audit = FootprintAudit(engine.pool, [engine.region()])
    for _ in range(4):
        audit.begin()
        audit.claim(engine.view())
        engine.pool["v.1"][:, :] += 0.0
        engine.pool["k.1"][engine.slots() // PAGE, engine.slots() % PAGE] += 1.0
        assert audit.end().problems == ()


def test_in_a_running_engine_a_source_that_never_changes_is_told_once_it_is_sure():
    """Lower layers changed in enough slots; a scale may stay as it is."""
    engine = Engine(layers=3)
    copy, scale = engine.pool["k.2"].clone(), torch.ones(PAGES, PAGE, 1)
    layers = [LayerTensors(0, {"k": engine.pool["k.0"]}), LayerTensors(2, {"k": copy}, scales={"k_scale": scale})]
    pool = {"k.0": engine.pool["k.0"], "spare": copy, "scale": scale}
    audit = FootprintAudit(pool, PagedPool("full", layers, null_slot=0).regions())
    told = []
    for _ in range(4):
        audit.begin()
        audit.claim(engine.view())
        engine.forward()
        told.append(audit.end().problems)
    at = -(-SURE_SLOTS // 7) - 1
    assert [bool(problems) for problems in told] == [i == at for i in range(4)]
    assert "source k.2 of region 'full' ever changed in 21 written slots in which lower layers did" in told[at][0]


def test_aliasing_regions_count_bytes_once():
    """Two regions take turns on the same memory."""
    engine = Engine()
    twin = engine.region()
    other = Region("other", twin.slots, twin.sources, null_slot=0)
    audit = FootprintAudit(engine.pool, [twin, other], strict=True)
    audit.begin()
    audit.claim(engine.view(tables=dict.fromkeys(("full", "other"), SlotTable(engine.table, page_size=PAGE))))
    before = {n: t.clone() for n, t in engine.pool.items()}
    engine.forward()
    changed = sum(int((t.view(torch.uint8) != before[n].view(torch.uint8)).sum()) for n, t in engine.pool.items())
    found = audit.end()
    assert (found.changed_bytes, found.passed) == (changed, True)


@pytest.mark.parametrize("kind", ["window", "compressed", "ring", "state"])
def test_each_kind_of_region_claims_what_it_stores(kind):
    """A window what its map has, compressed slots of complete groups, a ring's rows, one state a request."""
    tensor = torch.rand(40, 6)
    source = KVSource(tensor, "k", 0, 24, 24)
    table = SlotTable(torch.arange(1, 33, dtype=torch.int32).view(2, 16))
    if kind == "window":
        slot_map = torch.zeros(41, dtype=torch.int64)
        slot_map[[3, 18]] = torch.tensor([7, 9])
        region = Region("r", 40, (source,), RegionKind.WINDOW, 4, slot_map=slot_map, null_slot=0)
        written = [7, 9]
    elif kind == "compressed":
        # Slot numbers of tokens; positions 0 to 5 of the first row complete one group of 4, the other row none.
        region = Region("r", 40, (source,), RegionKind.COMPRESSED, tokens_per_slot=4, null_slot=0)
        written = [1]
    elif kind == "ring":
        region = Region("r", 40, (source,), RegionKind.RING, group_tokens=2)
        table = SlotTable(torch.tensor([[1, 2], [3, 4]]), ring_slots=2)
        written = [1, 2, 3, 4]
    else:
        region = Region("r", 40, (source,), RegionKind.STATE)
        table = SlotTable(torch.tensor([[5], [6]]), ring_slots=1)
        written = [5, 6]
    audit = FootprintAudit({"k": tensor}, [region], strict=True)
    view = BatchView(torch.tensor([0, 0]), torch.tensor([6, 3]), torch.arange(9), torch.tensor([0, 1]), {"r": table})
    for change, passed in ((written, True), ([*written, 30], False), (written[1:], False)):
        audit.begin()
        audit.claim(view)
        tensor[change] += 1.0
        found = audit.end()
        assert (found.passed, found.written_slots) == (passed, {"r": len(written)}), found.problems


@pytest.mark.parametrize("seed", range(12))
def test_any_layout_and_any_piece_size_give_the_same(seed, monkeypatch):
    """Permuted, sliced and odd-sized pools; the audit works in small pieces, and on whatever device its copy is."""
    draw = random.Random(seed)
    monkeypatch.setattr(snapshot, "PIECE_BYTES", draw.choice([7, 64, 1 << 20]))
    monkeypatch.setattr(slot_bytes, "INDEX_ENTRIES", draw.choice([1, 50, 1 << 20]))
    dtype = draw.choice([torch.uint8, torch.bfloat16, torch.float32])
    order = draw.choice([(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 1, 3), (0, 2, 3, 1), (2, 3, 1, 0)])
    shape = [PAGES, PAGE, draw.choice([1, 3]), draw.choice([1, 5, 8])]
    tensors = {}
    for name in ("k.0", "v.0", "k.1"):
        raw = torch.randint(0, 100, [shape[d] for d in order], generator=torch.Generator().manual_seed(seed)).to(dtype)
        tensors[name] = raw.permute([order.index(d) for d in range(4)])
    engine = Engine()
    engine.pool = tensors
    region = engine.of(tensors)
    written = engine.slots()

    def forward(slots: torch.Tensor) -> None:
        for tensor in tensors.values():
            tensor[slots // PAGE, slots % PAGE] += 1

    assert audited(engine, region, engine.view(), lambda: forward(written)).passed
    stray = torch.cat((written, torch.tensor([60])))
    found = audited(engine, region, engine.view(), lambda: forward(stray))
    assert "in slot 60 (page 15) of region 'full', in k.0, v.0, k.1, which the view does not name" in the_problem(found)


def test_memory_without_room_for_a_copy_is_refused(monkeypatch):
    """A fourth of what is free must suffice; else it is said what there is."""
    engine = Engine()
    monkeypatch.setattr(snapshot, "_free_bytes", lambda device: 100)
    with pytest.raises(snapshot.NoRoomError, match="only a fourth of free memory is used"):
        FootprintAudit(engine.pool, [engine.region()]).begin()


def test_a_pool_that_moved_is_seen():
    """The engine replaced a tensor; the function that names its tensors gives the new one."""
    engine = Engine()
    audit = FootprintAudit(lambda: engine.pool, [engine.region()])
    assert audit.moved() == {}
    engine.pool["k.1"] = engine.pool["k.1"].clone()
    assert audit.moved() == {"full": ["k.1"]}


def test_calls_out_of_order_and_unknown_regions_are_refused():
    """With what to do."""
    engine = Engine()
    audit = FootprintAudit(engine.pool, [engine.region()])
    with pytest.raises(MisuseError, match="call begin first"):
        audit.end()
    with pytest.raises(MisuseError, match="call begin first"):
        audit.claim(None)
    with pytest.raises(AttachError, match=r"knows no region 'other'; there are \['full'\]"):
        audit.claim_slots("other", None)
    audit.begin()
    audit.abandon()
    with pytest.raises(MisuseError, match="call begin first"):
        audit.end()
    with pytest.raises(AttachError, match="names no tensor with memory, got"):
        FootprintAudit({}, [engine.region()])
    with pytest.raises(AttachError, match="'k' must be a dense tensor with memory of its own, got list"):
        FootprintAudit({"k": [1]}, [engine.region()])


def test_the_same_forward_gives_the_same_sentences():
    """Twice the same engine, twice the same words."""

    def run() -> tuple[str, ...]:
        engine = Engine()
        return audited(
            engine, engine.region(None, "v.0"), engine.view(), lambda: engine.forward(torch.arange(20))
        ).problems

    assert run() == run() != ()
