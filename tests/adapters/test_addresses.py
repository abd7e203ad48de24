from itertools import combinations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from canary_adapters import addresses, paged_source, require_disjoint, row_source
from canary_adapters.sources import Part
from canary_core.errors import AttachError
from canary_core.region import KVSource, Region

STORAGE = torch.zeros(4096, dtype=torch.uint8)


@st.composite
def described(draw: st.DrawFn, layer: int = 0) -> tuple[KVSource, int]:
    """A small source of any description, sensible or not, and its slot count."""
    page_size = draw(st.integers(1, 4))
    source = KVSource(
        STORAGE,
        "k",
        layer,
        chunk_bytes=draw(st.integers(1, 6)),
        slot_stride_bytes=draw(st.integers(0, 24)),
        page_size=page_size,
        page_stride_bytes=draw(st.integers(0, 60)),
        offset_bytes=draw(st.integers(0, 50)),
        chunks=draw(st.integers(1, 3)),
        chunk_stride_bytes=draw(st.integers(0, 30)),
        present=draw(st.integers(0, page_size)),
    )
    return source, draw(st.integers(1, 15))


@given(case=described())
@settings(deadline=None, max_examples=300)
def test_slots_of_one_source(case, oracle):
    """Two places of a source share a byte exactly where naming all bytes says so, and the named slots are witnesses."""
    source, slots = case
    named = {slot: oracle.named(source, slot) for slot in range(slots)}
    apart = sum(map(len, named.values())) == len(set().union(*named.values()))
    whole = all(not n or len(n) == source.slot_bytes for n in named.values())
    clash = addresses.shared_slots(source, slots)
    assert (clash is None) == (apart and whole)
    if clash is not None:
        one, other = clash
        assert (named[one] & named[other]) if one != other else 0 < len(named[one]) < source.slot_bytes


@given(one=described(0), other=described(1), slots=st.integers(1, 15))
@settings(deadline=None, max_examples=300)
def test_two_sources(one, other, slots, oracle):
    """Two sources overlap exactly where naming all bytes says so; of two regions only where they don't share."""
    sources = [one[0], other[0]]
    all_bytes = [set().union(*(oracle.named(source, slot) for slot in range(slots))) for source in sources]
    meet = bool(all_bytes[0] & all_bytes[1])
    regions = [Region(name, slots, (source,)) for name, source in zip("ab", sources, strict=True)]
    assert _refused([Region("r", slots, tuple(sources))]) == meet
    assert _refused(regions) == meet
    assert not _refused(regions, [frozenset("ab")])


def test_known_mistakes(refusal):
    """What engines get wrong: halves one row apart instead of one page, a tensor listed twice, group strides mixed."""
    flat = torch.zeros(64, 2, 4)
    pages = flat.view(8, 2, 4, 2, 4)
    k, v = (paged_source(pages[:, half], Part(name, 0)) for half, name in enumerate("kv"))
    assert require_disjoint([Region("r", 32, (k, v))]) == ()

    shifted = row_source(flat[1:], Part("v", 0), (8, 4))
    first = row_source(flat, Part("k", 0), (8, 4))
    refusal(lambda: require_disjoint([Region("r", 32, (first, shifted))]), "r/k.0", "r/v.0", "slot 1", "slot 0")
    twice = row_source(flat, Part("k", 9), (8, 4))
    refusal(lambda: require_disjoint([Region("r", 32, (first, twice))]), "k.9", "share once")
    refusal(
        lambda: require_disjoint([Region("full", 32, (first,)), Region("window", 32, (twice,))]),
        "full/k.0",
        "window/k.9",
        "sharing",
    )
    refusal(lambda: require_disjoint([Region("full", 32, (first,))], [frozenset({"ful"})]), "ful", "full")


def test_one_byte_is_an_overlap_and_touching_is_not():
    """The ends of address ranges are exact."""
    first = KVSource(STORAGE, "k", 0, chunk_bytes=8, slot_stride_bytes=8)
    for offset, meet in [(32, False), (31, True)]:
        second = KVSource(STORAGE, "v", 0, chunk_bytes=8, slot_stride_bytes=8, offset_bytes=offset)
        assert _refused([Region("r", 4, (first, second))]) == meet


def test_many_interleaved_layers_are_decided():
    """80 layers of K and V and 3000 blocks in one tensor: every pair is decided, none is refused."""
    layers, page, pages = 80, 16, 3000
    pool = torch.empty(pages * layers * 2 * page, 8, dtype=torch.uint8)
    rows = layers * 2 * page
    sources = tuple(
        row_source(pool[(2 * layer + half) * page :], Part("kv"[half], layer), (rows, page))
        for layer in range(layers)
        for half in (0, 1)
    )
    regions = [Region("r", pages * page, sources)]
    assert require_disjoint(regions) == ()


def test_interleaved_strides_of_one_lattice_are_decided():
    """Slots every 64 bytes and every 192 bytes, half a step apart: decided however many there are."""
    pool = torch.empty(64 * 90_000, dtype=torch.uint8)
    one = KVSource(pool, "k", 0, chunk_bytes=32, slot_stride_bytes=64)
    other = KVSource(pool, "v", 0, chunk_bytes=32, slot_stride_bytes=192, offset_bytes=32)
    assert require_disjoint([Region("a", 90_000, (one,)), Region("b", 30_000, (other,))]) == ()


def test_the_whole_search_is_bounded(monkeypatch):
    """All pairs draw on one budget; those beyond it are undecided."""
    pool = torch.zeros(64, 3, 8)
    region = Region("r", 64, tuple(row_source(pool[:, layer], Part("k", layer)) for layer in range(3)))
    monkeypatch.setattr(addresses, "TOTAL_STEPS", 2)
    undecided = require_disjoint([region])
    assert 0 < len(undecided) < 3
    assert undecided[-1] == "r/k.1 ~ r/k.2"


def test_an_undecided_pair_is_named_not_refused(monkeypatch):
    """Strides without a common structure may exhaust the search: that is told, and is no refusal."""
    monkeypatch.setattr(addresses, "PAIR_STEPS", 2)
    one = KVSource(STORAGE, "k", 0, chunk_bytes=1, slot_stride_bytes=6, page_size=8, page_stride_bytes=90)
    other = KVSource(STORAGE, "v", 0, chunk_bytes=1, slot_stride_bytes=10, page_size=8, page_stride_bytes=14)
    assert require_disjoint([Region("r", 16, (one, other))]) == ("r/k.0 ~ r/v.0",)
    assert addresses.shared_slots(other, 16) is None


def test_empty_and_separate_tensors_never_meet():
    """Sources without present slots have no bytes, and other storages other addresses."""
    tensors = [torch.zeros(4, 8) for _ in range(3)] + [torch.zeros(4, 0)]
    sources = [row_source(t, Part("k", i)) for i, t in enumerate(tensors[:3])]
    sources.append(KVSource(tensors[3], "k", 3, 32, 32, page_size=4, present=0))
    regions = [Region(s.name, 4, (s,)) for s in sources]
    assert not any(_refused(pair) for pair in combinations(regions, 2))


def _refused(regions, sharing=()) -> bool:
    try:
        assert require_disjoint(regions, sharing) == ()
    except AttachError:
        return True
    return False
