"""Shapes of the byte kernels' work: the slots and sources taken together by a program."""

from typing import NamedTuple

from canary_core.ops.kernels.fields import ByteConstants, Strip
from canary_core.ops.sources import SourceGroup, SourceShape
from canary_core.ops.state import RegionState
from canary_core.records import READ_TILE
from canary_core.region import RegionKind

COLUMNS = 32
"""Words of a slot in one load: 8 lanes of 16 bytes."""


class Tile(NamedTuple):
    """Path of a kernel over slots: slots looked up together by a program, its warps, loads of a slot in flight
    (``unrolled``), and words of a slot in one load (``columns``).

    ``abreast``: 0 where a program reads the looked-up slots together, each a row of the tile, in one source. Otherwise
    it reads them one after another, and the rows are ``abreast`` sources of one slot; columns and loads are powers of
    two then.

    ``sum_words``: words added up at once by a thread, so that it keeps one sum. ``stages``: rounds of loads in flight
    through shared memory; 0 keeps the words in registers. ``registers``: most per thread, 0 for no limit.
    ``programs``: per multiprocessor; 0 for one program per tile.
    """

    slots: int
    warps: int
    unrolled: int
    columns: int = COLUMNS
    abreast: int = 0
    sum_words: int = 1
    stages: int = 0
    registers: int = 0
    programs: int = 16


SCRUB_TILE = Tile(32, 2, 2)
# 12 warps of 168 registers are what a multiprocessor of 65,536 has room for.
READ_CHECK_TILE = Tile(READ_TILE, 1, 3, sum_words=4, registers=168, programs=12)
# What arrives, or is written, has few tiles, so nothing is gained by programs that stay; loads through shared memory
# need fewer registers.
VERIFY_TILE = WRITE_TILE = Tile(32, 1, 1, sum_words=4, stages=4, programs=0)

# Long slots are few, and few of a batch's tokens or places have one: tiles of slots would be nearly empty and most of a
# device idle. A key has 8 bytes for a word of 4 and comes from the second cache, so sources of one slot share the keys
# that were loaded. Columns are 4 words for each thread of all warps: then a thread has the same words of all sources,
# and adds them up without the others.
LONG_TILE = Tile(1, 16, 2, columns=2048, abreast=2)
"""Many warps, since few requests make few programs; benchmarks/history/tuning.md has the tiles measured beside it."""
SUMMED_TILE = Tile(READ_TILE, 1, 2, sum_words=4)
"""For sources that share fingerprints: a program goes through all of a group with the slots of a tile."""
NARROW_TILE = SUMMED_TILE._replace(warps=2, programs=8)
"""The same where a row is as narrow as one load. The scrub is slower with it, and so are wider rows."""
LOOKED_UP = 128
"""Tokens of a batch looked at together by a program for long slots."""


class Tiles(NamedTuple):
    """The tiles of one kernel: for slots of usual length, such as KV rows, for long ones, and for narrow ones with
    shared fingerprints."""

    usual: Tile
    long: Tile
    narrow: Tile = SUMMED_TILE

    def of(self, state: RegionState, group: SourceGroup) -> Tile:
        """The tile for a source group of a region."""
        if is_long(state, group):
            return self.long
        if not group.parts:
            return self.usual
        return self.narrow if group.shapes[0].words <= COLUMNS else SUMMED_TILE


WRITE_TILES = Tiles(WRITE_TILE, LONG_TILE._replace(slots=LOOKED_UP), NARROW_TILE)
READ_CHECK_TILES = Tiles(READ_CHECK_TILE, LONG_TILE._replace(slots=READ_TILE), NARROW_TILE)
SCRUB_TILES = Tiles(SCRUB_TILE, LONG_TILE)
VERIFY_TILES = Tiles(VERIFY_TILE, LONG_TILE)

LONG_WORDS = 8192
"""A slot of more words in one source is long: more than a row of 128 heads of 128 bfloat16 has."""
LONG_STATE_WORDS = 1024
"""A request has one slot of a `RegionKind.STATE` region, so shorter ones are few already."""


def is_long(state: RegionState, group: SourceGroup) -> bool:
    """Whether the slots of a source group are read one at a time."""
    most = LONG_STATE_WORDS if state.region.kind is RegionKind.STATE else LONG_WORDS
    return group.shapes[0].words > most


def constants(group: SourceGroup, tile: Tile) -> ByteConstants:
    """Of a kernel for the sources of ``group`` with ``tile``."""
    first, *narrow = group.shapes
    block, unrolled = loads(first, tile)
    strips = [_strip(first, block, unrolled, min(tile.sum_words, block), tile.stages)]
    strips += [_strip(shape, _whole(shape)) for shape in narrow]
    abreast = len(group.columns) if tile.abreast else 0
    return ByteConstants(tuple(strips), tile.slots, tile.abreast, abreast, group.parts)


def _strip(shape: SourceShape, load_words: int, unrolled: int = 1, sum_words: int = 1, stages: int = 0) -> Strip:
    page_size, chunks, chunk_bytes, alignment = shape
    slot, chunk = (chunks * chunk_bytes, shape.words), (chunk_bytes, -(-chunk_bytes // 4))
    return Strip(page_size, *slot, *chunk, alignment, load_words, unrolled, sum_words, stages)


def loads(shape: SourceShape, tile: Tile) -> tuple[int, int]:
    """Words of a load, loads in flight. Loads of a tile of slots have the largest width up to the tile's columns that
    divides a slot, so that no lane is masked off, else all columns. Of a long slot only the last round has masked
    lanes."""
    words = shape.words
    if tile.abreast:
        block = min(tile.columns, _whole(shape))
        return block, min(tile.unrolled, 1 << (-(-words // block) - 1).bit_length())
    widest = max(w for w in (1, 2, 4, 8, 16, 32) if w <= tile.columns and words % w == 0)
    block = tile.columns
    if widest >= min(4, words):
        block = widest
    elif words < tile.columns:
        block = _whole(shape)
    blocks = -(-words // block)
    return block, max(n for n in range(1, tile.unrolled + 1) if blocks % n == 0)


def _whole(shape: SourceShape) -> int:
    """Words of a load of a whole slot, as needed by a strip."""
    return 1 << (shape.words - 1).bit_length()
