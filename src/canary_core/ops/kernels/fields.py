"""Arguments and compile-time constants of kernels that belong together, by name.

Triton takes a named tuple as one argument and compiles its members as arguments of their own, in order. Kernels make
tuples with keywords: Triton's cache knows the names in a kernel's code, and not the order of a tuple's.
"""

from typing import Any, NamedTuple


class RegionFields(NamedTuple):
    """The first argument of every kernel: tensors and numbers of a region. p_records: int64, and p_words: int32, the
    same memory; index: the region's number."""

    p_records: Any
    p_words: Any
    p_claims: Any
    p_plan: Any
    p_heads: Any
    p_chains: Any
    p_cursors: Any
    p_counters: Any
    p_clock: Any
    p_ring: Any
    ring_rows: Any
    index: Any
    slots: Any
    null_first: Any
    null_end: Any


class SampleFields(NamedTuple):
    """Sampled tokens of a region; no tensors where nothing is compared with the sampler."""

    p_samples: Any
    p_given: Any
    p_ends: Any
    p_tails: Any
    rows: Any


class SourceFields(NamedTuple):
    """The sources of a group, and the region's fingerprints, ``count`` of a slot. p_weights and named, the number of
    the region's sources, are for `sums.Sums`."""

    p_descriptors: Any
    p_columns: Any
    p_keys: Any
    p_salts: Any
    p_weights: Any
    p_fingerprints: Any
    count: Any
    named: Any


class BatchFields(NamedTuple):
    """Tensors of a batch; None for those it doesn't have."""

    p_prefix: Any
    p_new: Any
    p_writers: Any
    p_anchors: Any
    p_tokens: Any
    p_positions: Any


class TableFields(NamedTuple):
    """Tensors of a batch's table: entries, the batch's rows of it, and the region's slot map."""

    p_entries: Any
    p_rows: Any
    p_map: Any


class OwnTokens(NamedTuple):
    """The requests' own tokens, or None: tokens of a row, and the stride of rows."""

    p_tokens: Any
    width: Any
    stride: Any


class Space(NamedTuple):
    """Translation of numbers of slots: by a slot map, or None, to slots of a region. Null slots are those
    from ``null_first`` to before ``null_end``."""

    p_map: Any
    map_length: Any
    slots: Any
    null_first: Any
    null_end: Any


class TablePlaces(NamedTuple):
    """A table for looking up slots: its entries, the width of a row, and elements in all; and the fields of the `Space`
    of its numbers, since Triton up to 3.7 takes no None within a tuple within a tuple."""

    p_entries: Any
    width: Any
    extent: Any
    p_map: Any
    map_length: Any
    slots: Any
    null_first: Any
    null_end: Any


class Source(NamedTuple):
    """A source of this program; of sources abreast each field is a block. column: its index among the region's sources;
    salt of its fingerprints; address of slot 0; strides in bytes; present: slots of a page that have bytes; words of a
    slot."""

    column: Any
    salt: Any
    address: Any
    page_stride: Any
    slot_stride: Any
    chunk_stride: Any
    present: Any
    words: Any


class Strip(NamedTuple):
    """Compile-time constants of a source: slots of a page; bytes and words of a slot and of a chunk, each chunk's last
    word padded; alignment in bytes; words of a load, loads in flight, words of a sum, and stages, see `tiles.Tile`."""

    page_size: int
    slot_bytes: int
    slot_words: int
    chunk_bytes: int
    chunk_words: int
    alignment: int
    load_words: int
    unrolled: int
    sum_words: int
    stages: int


class ByteConstants(NamedTuple):
    """Compile-time constants of a kernel that reads bytes.

    `STRIPS`: of each source that a program takes together, first the wide one and then the narrow one, if there is one.
    `SLOTS`: of a tile. `ABREAST`: sources of one slot taken together, of `SOURCES`; 0 where a program takes one.
    `PARTS`: most sources that share fingerprints, see `sums.Sums`; 0 where each has its own.
    """

    STRIPS: tuple[Strip, ...]
    SLOTS: int
    ABREAST: int
    SOURCES: int
    PARTS: int
