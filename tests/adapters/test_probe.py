"""`probe_layout`: caches whose shape says nothing of where K and V are."""

import pytest
import torch

from canary_adapters import probe_layout
from canary_core import AttachError

PAGES, PAGE, HEADS, DIM = 5, 4, 2, 8


def cache():
    """K and V of a head side by side, as far as the shape says: [pages, heads, page, 2 * dim]."""
    return torch.zeros(PAGES, HEADS, PAGE, 2 * DIM)


def made():
    """A token's K or V."""
    return torch.empty(HEADS, DIM).uniform_(1, 2)


def side_by_side(tensor, half, slots):
    """As the shape says."""
    for slot in slots.tolist() if half else ():
        tensor[slot // PAGE, :, slot % PAGE, DIM * (half == "v") :][:, :DIM] = made()


def transposed(tensor, half, slots):
    """K, then V of a page, and K with its dimensions before its slots, as CPU attention has it."""
    for slot in slots.tolist() if half else ():
        both = tensor[slot // PAGE].view(HEADS, 2, PAGE * DIM)
        if half == "k":
            both[:, 0].view(HEADS, DIM, PAGE)[:, :, slot % PAGE] = made()
        else:
            both[:, 1].view(HEADS, PAGE, DIM)[:, slot % PAGE] = made()


@pytest.mark.parametrize("store", [side_by_side, transposed])
def test_sources_hold_exactly_what_is_stored(store):
    """The sources of a probed layout name the bytes that the store operation writes, of each slot and half, and no
    others."""
    pool = cache()
    sources = [piece.source(pool, PAGE, 3, pool.dtype) for piece in probe_layout(store, "kv", pool, PAGES, PAGE)]
    assert {source.layer for source in sources} == {3}
    assert not pool.any()
    for half in "kv":
        for slot in range(PAGES * PAGE):
            pool.zero_()
            store(pool, half, torch.tensor([slot]))
            written = set((pool.flatten().nonzero()[:, 0] * pool.element_size()).tolist())
            claimed = set()
            for source in (source for source in sources if source.half == half):
                start = source.offset_bytes + slot // PAGE * source.page_stride_bytes
                start += slot % PAGE * source.slot_stride_bytes
                for chunk in range(source.chunks):
                    first = start + chunk * source.chunk_stride_bytes
                    claimed.update(range(first, first + source.chunk_bytes, pool.element_size()))
            assert claimed == written


def with_scales(tensor, half, slots):
    """K, its scale, V and its scale of each head, as int8 with scales of single tokens. That of zeros is not 0."""
    for slot in slots.tolist():
        for name, first in (("k", 0), ("v", DIM)):
            part = tensor[slot // PAGE, :, slot % PAGE, first : first + DIM]
            part[:, :-1] = made()[:, :-1] if half == name else 0.0
            part[:, -1] = part.amax(1).clamp(min=1e-6)


def test_a_scale_belongs_to_its_half():
    """Where both scales are written with each store, only that of the half that changes counts."""
    k, v = probe_layout(with_scales, "kv", cache(), PAGES, PAGE)
    assert [(piece.half, piece.offset_bytes, piece.chunk_bytes) for piece in (k, v)] == [
        ("k", 0, DIM * 4),
        ("v", DIM * 4, DIM * 4),
    ]


def test_strides_of_the_cache_count_not_its_shape():
    """A cache that is permuted is probed in the order in which its memory is."""
    pool = torch.zeros(HEADS, PAGES, PAGE, 2 * DIM).permute(1, 0, 2, 3)
    (k, _) = probe_layout(side_by_side, "kv", pool, PAGES, PAGE)
    assert k.page_stride_bytes == PAGE * 2 * DIM * 4
    assert k.chunks == HEADS
    assert k.chunk_stride_bytes == PAGES * PAGE * 2 * DIM * 4


def nothing(tensor, half, slots):
    """Stores nothing."""


def over_each_other(tensor, half, slots):
    """Stores both halves in one place."""
    side_by_side(tensor, half and "k", slots)


def in_tiles(tensor, half, slots):
    """Two slots lie interleaved, the next two somewhere else."""
    for slot in slots.tolist() if half else ():
        tensor[slot // PAGE, :, slot % PAGE // 2 * 2 :][:, :2].flatten(1)[:, slot % 2 : 2 * DIM : 2] = made()
        tensor[slot // PAGE, 0, slot % PAGE, -1] = 1.0


@pytest.mark.parametrize(
    ("store", "reason"),
    [(nothing, "changed nothing"), (over_each_other, "over another half"), (in_tiles, "does not lie where")],
)
def test_what_can_not_be_described_is_refused(store, reason):
    """A store that changes nothing, two halves in the same bytes, and slots at no common distance are named."""
    with pytest.raises(AttachError, match=reason):
        probe_layout(store, "kv", cache(), PAGES, PAGE)


def test_a_cache_without_a_dimension_of_pages_is_refused():
    """The number of pages must be one of the cache's dimensions."""
    with pytest.raises(AttachError, match="counts its 6 blocks"):
        probe_layout(side_by_side, "kv", cache(), 6, PAGE)
