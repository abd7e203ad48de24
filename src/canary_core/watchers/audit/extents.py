"""How many distinct bytes sources and tensors cover, by their addresses alone.

Each is a `Box`. Most pools come to one run once strides that continue each other are merged, and boxes that lie side by
side (the K and V of one page). What is left are boxes with gaps, such as half of the heads; these are counted as they
are where they can't overlap, else run by run.
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from canary_core.boxes import Box, Dim

MOST_RUNS = 1 << 21
"""Most runs counted one by one; beyond, boxes count as distinct, and at most as their span."""


def joined(boxes: Iterable[Box]) -> list[Box]:
    """The same bytes in fewer boxes, by address: boxes side by side are joined, and boxes within another's only run go
    away."""
    found = sorted(set(boxes), key=_order)
    while True:
        joint = sorted({box.merged() for box in _side_by_side(found)}, key=_order)
        if len(joint) == len(found):
            return joint
        found = joint


def distinct_bytes(boxes: Iterable[Box]) -> int:
    """Bytes in at least one of ``boxes``."""
    return sum(_count(group) for group in _apart(joined(boxes)))


def clipped(boxes: Iterable[Box], start: int, end: int) -> list[Box]:
    """The part of ``boxes`` within ``[start, end)``; a box of several runs counts by its start."""
    found = []
    for box in boxes:
        if box.dims:
            found += [box] if start <= box.start < end else []
        elif box.start < end and start < box.end:
            first = max(box.start, start)
            found.append(Box(first, min(box.end, end) - first))
    return found


def _order(box: Box) -> tuple[int, int, tuple[Dim, ...]]:
    return box.start, -box.length, box.dims


def _side_by_side(boxes: Sequence[Box]) -> Iterator[Box]:
    """Boxes of the same dims, in the order of their starts, joined: a box that begins within or at the end of the one
    before is appended, as long as the next run lies beyond."""
    alike: dict[tuple[Dim, ...], list[Box]] = defaultdict(list)
    for box in boxes:
        alike[box.dims].append(box)
    whole = _chained(alike.pop((), []))
    yield from whole
    starts = [run.start for run in whole]
    for group in alike.values():
        for box in _chained(group):
            at = bisect(starts, box.start) - 1
            if at < 0 or box.end > whole[at].end:
                yield box


def _chained(boxes: Sequence[Box]) -> list[Box]:
    """As `_side_by_side`, of one group."""
    kept = list(boxes[:1])
    for box in boxes[1:]:
        last = kept[-1]
        end = max(last.start + last.length, box.start + box.length)
        nearest = min((stride for stride, _ in box.dims), default=end - last.start)
        if box.start <= last.start + last.length and end - last.start <= nearest:
            kept[-1] = replace(last, length=end - last.start)
        elif box.dims == last.dims and (box.start - last.start) in (s * n for s, n in box.dims):
            # It goes on where one of the strides ends, as V does behind K in a page that has both.
            dims = ((s, n * 2 if s * n == box.start - last.start else n) for s, n in box.dims)
            kept[-1] = replace(last, dims=tuple(dims))
        else:
            kept.append(box)
    return kept


def _apart(boxes: Sequence[Box]) -> Iterator[list[Box]]:
    """Groups of boxes without a common byte between groups."""
    ends = [0, *accumulate((box.end for box in boxes), max)]
    group: list[Box] = []
    for box, reached in zip(boxes, ends, strict=False):
        if group and box.start >= reached:
            yield group
            group = []
        group.append(box)
    if group:
        yield group


def _count(boxes: Sequence[Box]) -> int:
    """Distinct bytes of overlapping boxes."""
    most = sum(box.size for box in boxes)
    span = max(box.end for box in boxes) - boxes[0].start
    if len(boxes) == 1 or _interleave(boxes) or sum(box.runs for box in boxes) > MOST_RUNS:
        return min(most, span)
    starts = torch.cat([box.starts() for box in boxes])
    ends = starts + torch.cat([torch.full((box.runs,), box.length, device="cpu") for box in boxes])
    starts, order = starts.sort()
    ends = ends[order].cummax(0).values
    before = torch.cat((starts[:1], ends[:-1]))
    return int((ends - torch.maximum(starts, torch.minimum(before, ends))).sum())


def _interleave(boxes: Sequence[Box]) -> bool:
    """Whether the boxes repeat at the same strides and their first runs are apart: then all runs are."""
    first = boxes[0]
    if any(box.dims != first.dims for box in boxes) or not first.dims:
        return False
    nearest = min(stride for stride, _ in first.dims)
    apart = all(a.start + a.length <= b.start for a, b in pairwise(boxes))
    return apart and boxes[-1].start + boxes[-1].length - first.start <= nearest and _nested(first)


def _nested(box: Box) -> bool:
    """Whether each stride is at least the span of the smaller ones, so that no two runs overlap."""
    reach = 0
    for stride, count in reversed(box.dims):
        if reach and stride < reach:
            return False
        reach = stride * count
    return True
