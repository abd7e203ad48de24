"""Readers of one prefix within `check`: the parts of its kernel for `canary_core.ops.readers`."""

import triton
import triton.language as tl

from canary_core.ops import readers
from canary_core.ops.kernels.common import find_entry

MOST_SHARING = tl.constexpr(readers.MOST_ROWS)


@triton.jit
def first_element(table, row, m, stride):
    """The element of a table with the first entry of batch rows."""
    first = row.to(tl.int64)
    if table.p_rows is not None:
        first = tl.load(table.p_rows + row, mask=m, other=0).to(tl.int64)
    return first * stride


@triton.jit
def with_last_entry(batch, places, table, i_row, stop, table_stride, rows, TABLE: tl.constexpr):
    """The numbers of all rows, a block; and whether each reads beyond position ``stop``, and has the entry of ``i_row``
    at the place before."""
    o_row = tl.arange(0, TABLE.ROWS)
    m = o_row < rows
    prefix = tl.load(batch.p_prefix + o_row, mask=m, other=0).to(tl.int64) // TABLE.GROUP
    o_own, _, there = find_entry(places, first_element(table, i_row, True, table_stride), stop - 1, TABLE)
    o_entry, _, present = find_entry(places, first_element(table, o_row, m, table_stride), stop - 1, TABLE)
    present = present & (prefix > stop) & there
    own = tl.load(places.p_entries + o_own, mask=there, other=0)
    entry = tl.load(places.p_entries + o_entry, mask=present, other=0)
    return o_row, present & (entry == own)


@triton.jit
def follows_another(
    batch, own_tokens, places, table, i_row, begin, stop, table_stride, rows,
    TABLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Whether the row leaves the span ``[begin, stop)`` to its leader."""
    o_row, b_alike = with_last_entry(batch, places, table, i_row, stop, table_stride, rows, TABLE)
    i_leader = tl.min(tl.where(b_alike, o_row, i_row), 0)
    same = i_leader < i_row
    if same:
        same = follows(batch, own_tokens, places, table, i_row, i_leader, begin, stop, table_stride, TABLE, TILE)
    return same


@triton.jit
def led_by(batch, places, table, i_row, stop, table_stride, rows, TABLE: tl.constexpr):
    """The rows that may follow a row in the span that ends before ``stop``, others as ``TABLE.ROWS``: a block."""
    o_row, b_alike = with_last_entry(batch, places, table, i_row, stop, table_stride, rows, TABLE)
    leads = tl.min(tl.where(b_alike, o_row, i_row), 0) == i_row
    return tl.where(b_alike & leads & (o_row > i_row), o_row, TABLE.ROWS)


@triton.jit
def follows(
    batch, own_tokens, places, table, i_row, i_leader, begin, stop, table_stride,
    TABLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Whether two rows have the same entries for positions ``[begin, stop)`` and the one before, and the same tokens
    and anchor of their own there."""
    GROUP: tl.constexpr = TABLE.GROUP
    o = tl.arange(0, TILE).to(tl.int64)
    differs = tl.zeros([TILE], tl.int32)
    ours = first_element(table, i_row, True, table_stride)
    theirs = first_element(table, i_leader, True, table_stride)
    end = (stop * GROUP - 1) // TABLE.PAGE_SIZE + 1
    for page in range((tl.maximum(begin, 1) * GROUP - 1) // TABLE.PAGE_SIZE, end, TILE):
        m = page + o < end
        inside = m & (page + o < places.width)
        o_ours, o_theirs = ours + page + o, theirs + page + o
        there = inside & (o_ours >= 0) & (o_ours < places.extent)
        also = inside & (o_theirs >= 0) & (o_theirs < places.extent)
        entry = tl.load(places.p_entries + o_ours, mask=there, other=0)
        other = tl.load(places.p_entries + o_theirs, mask=also, other=0)
        differs = differs | (m & ((there & also & (entry == other)) == 0)).to(tl.int32)
    if own_tokens.p_tokens is not None:
        for position in range(begin, stop, TILE):
            o_own = (position + o + 1) * GROUP - 1
            m = (position + o < stop) & (o_own < own_tokens.width)
            p_token = own_tokens.p_tokens + o_own
            token = tl.load(p_token + i_row.to(tl.int64) * own_tokens.stride, mask=m, other=0)
            other = tl.load(p_token + i_leader.to(tl.int64) * own_tokens.stride, mask=m, other=0)
            differs = differs | (token != other).to(tl.int32)
    same = tl.max(differs, 0) == 0
    if batch.p_anchors is not None:
        same = same & ((begin > 0) | (tl.load(batch.p_anchors + i_row) == tl.load(batch.p_anchors + i_leader)))
    return same
