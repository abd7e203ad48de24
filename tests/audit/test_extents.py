"""Distinct bytes of boxes, against a set of addresses; and in time that no start-up notices."""

import random

import pytest
import torch

from canary_core import KVSource
from canary_core.boxes import Box, box_of, boxes_of
from canary_core.watchers.audit import extents
from canary_core.watchers.audit.extents import clipped, distinct_bytes, joined


def addresses(box: Box) -> set[int]:
    """Every byte of it."""
    return {start + i for start in box.starts().tolist() for i in range(box.length)}


@pytest.mark.parametrize("seed", range(40))
def test_distinct_bytes_are_those_of_a_set(seed):
    """Of pages, slots and chunks in any order and anywhere, whether they overlap or not."""
    draw = random.Random(seed)
    boxes = []
    for _ in range(draw.randrange(1, 6)):
        length, dims, reach = draw.choice([1, 3, 4]), [], 0
        reach = length
        for _ in range(draw.randrange(3)):
            stride, count = reach * draw.choice([1, 1, 2, 3]), draw.randrange(1, 5)
            dims.append((stride, count))
            reach = stride * count
        box = Box(draw.randrange(30), length, tuple(dims))
        boxes += [box] * draw.choice([1, 1, 2])
    boxes += [Box(b.start + b.length, b.length, b.dims) for b in boxes if draw.random() < 0.5]
    expected = set().union(*map(addresses, boxes))
    assert distinct_bytes(boxes) == len(expected)
    assert set().union(*map(addresses, joined(boxes))) == expected


@pytest.mark.parametrize("seed", range(20))
def test_a_source_covers_the_bytes_of_its_slots(seed):
    """Also where the last page is cut short, and where pages hold fewer slots than they number."""
    draw = random.Random(seed)
    page, chunk, chunks = draw.choice([1, 4]), draw.choice([3, 8]), draw.choice([1, 2])
    source = KVSource(
        torch.zeros(4000, dtype=torch.uint8), "k", 0, chunk, chunk * 2, page, 200, draw.randrange(9), chunks, chunk * 9,
        present=draw.randrange(1, page + 1),
    )  # fmt: skip
    slots = draw.randrange(1, 15)
    expected = set()
    for slot in range(slots):
        if slot % page < source.present_slots:
            first = source.address + slot // page * source.page_stride_bytes + slot % page * source.slot_stride_bytes
            expected |= {first + c * source.chunk_stride_bytes + b for c in range(chunks) for b in range(chunk)}
    assert set().union(*map(addresses, boxes_of(source, slots))) == expected


def test_a_tensor_covers_its_elements():
    """Permuted and sliced; nothing but one run where it is dense."""
    whole = torch.zeros(4, 3, 5)
    assert box_of(whole.permute(2, 0, 1)) == Box(whole.data_ptr(), 240)
    assert box_of(whole[:, 1:2]).size == 4 * 5 * 4


def test_what_lies_in_a_range_is_cut_to_it():
    """Whole runs; boxes with gaps count where they begin."""
    assert clipped([Box(0, 10), Box(20, 4)], 5, 22) == [Box(5, 5), Box(20, 2)]
    gaps = Box(4, 1, ((2, 3),))
    assert (clipped([gaps], 4, 6), clipped([gaps], 5, 9)) == ([gaps], [])


@pytest.mark.parametrize("layout", ["rows", "stacked", "heads first", "half of the heads", "halves apart"])
def test_large_pools_are_counted_without_their_runs(layout, monkeypatch):
    """32 layers of K and V, a million slots: hardly a run of them is looked at."""
    monkeypatch.setattr(extents, "MOST_RUNS", 1000)
    pages, page, heads, row, sources = 1 << 16, 16, 8, 256, []
    size = pages * page * heads * row
    for layer in range(32):
        for half in range(2):
            start = layer * 2 * size + half * (size if layout != "stacked" else page * heads * row)
            span = page * heads * row * (2 if layout == "stacked" else 1)
            dims = {
                "heads first": (heads * row * page, page, row, heads, row * page),
                "half of the heads": (span, page, heads * row, heads // 2, row),
                "halves apart": (span, page, heads * row, heads // 2, row * 2),
            }.get(layout, (span, page, heads * row, 1, 0))
            length = heads * row if layout in ("rows", "stacked") else row
            page_stride, slots, slot_stride, chunks, chunk_stride = dims
            dims = ((page_stride, pages), (slot_stride, slots), (chunk_stride, chunks))
            sources.append(Box(start, length, dims).merged())
    share = 2 if "hal" in layout else 1
    assert distinct_bytes(sources) == 64 * size // share
