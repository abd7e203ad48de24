"""What the hashes promise (`canary_core.ops.hashing`): every flipped bit is seen in every layout, and no corruption
that faults make is missed. An oracle in plain Python integers knows nothing of our code."""

import random
from collections.abc import Callable

import pytest
import torch
from ops.scenario import list_slots

from canary_core import CanaryConfig, KVSource, Region
from canary_core.batch import BatchView, SlotTable
from canary_core.ops import hashing
from canary_core.ops.backends import Backend, torch_backend, triton_backend
from canary_core.ops.payload import fingerprint_bytes
from canary_core.ops.state import RegionState, Shared
from canary_core.records import POSITION, PREFIX_HASH, Counter, Kind, Row, State

MASK = (1 << 64) - 1


# The oracle: numbers typed out once more, from the papers and from the docstrings.


def oracle_finaliser(x: int) -> int:
    """splitmix64's output for the state ``x``."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def oracle_prefix(tokens: list[int]) -> list[int]:
    """The prefix hash after each token, from the common anchor."""
    out, value = [], 0x0082EFA98EC4E6C9
    for position, token in enumerate(tokens):
        value = (value + oracle_finaliser((position << 32) | (token & 0xFFFFFFFF))) & MASK
        out.append(value)
    return out


def oracle_fingerprint(chunks: list[bytes], column: int) -> int:
    """The fingerprint of a slot with these chunks in source ``column``."""
    value = oracle_finaliser(0x13198A2E03707344 + column) | 1
    index = 0
    for chunk in chunks:
        for first in range(0, len(chunk), 4):
            word = sum(byte << (8 * i) for i, byte in enumerate(chunk[first : first + 4]))
            value += word * (oracle_finaliser(0x243F6A8885A308D3 + index) | 1)
            index += 1
    return value & MASK


def unsigned(values: torch.Tensor) -> list[int]:
    """int64 as the 64 bits they are."""
    return [v & MASK for v in values.tolist()]


def test_the_finaliser_is_splitmix64():
    """The oracle itself, against the published first outputs for seed 1234567."""
    golden = 0x9E3779B97F4A7C15
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [oracle_finaliser((1234567 + i * golden) & MASK) for i in range(3)] == published


@pytest.mark.parametrize("sizes", [(1,), (5,), (16,), (33,), (8, 8), (3, 3, 3), (1, 1), (576,)])
def test_fingerprints_equal_the_oracle(sizes):
    """Chunks of any length, a single byte included, of any content, for any source."""
    rng = random.Random(len(sizes))
    for column in (0, 1, 63):
        for make in (lambda n: rng.randbytes(n), lambda n: b"\0" * n, lambda n: b"\xff" * n):
            chunks = [make(n) for n in sizes]
            data = torch.tensor([list(b"".join(chunks))], dtype=torch.uint8)
            assert unsigned(fingerprint_bytes(data, sizes[0], column)) == [oracle_fingerprint(chunks, column)]


def test_prefix_hashes_equal_the_oracle():
    """What a prefill records, in every slot; negative token ids are padding tokens' and count with 32 bits."""
    rng = random.Random(0)
    tokens = [rng.randrange(-5, 1 << 31) for _ in range(300)]
    pool = torch.zeros(301, 5, dtype=torch.uint8)
    state = state_of((KVSource(pool, "k", 0, 5, 5),), 301)
    table = SlotTable(torch.arange(1, 301)[None])
    batch = BatchView(
        prefix_lens=torch.tensor([0]), new_lens=torch.tensor([300]), token_ids=torch.tensor(tokens),
        writers=torch.tensor([0]), tables={"r": table},
    )  # fmt: skip
    for backend in (torch_backend(), triton_backend()):
        state.records.zero_()
        backend.check(state, batch, table)
        backend.fingerprint(state, batch, table)
        backend.record(state, batch, table)
        stored = state.records[1:, PREFIX_HASH : PREFIX_HASH + 2].contiguous().view(torch.int64)[:, 0]
        assert unsigned(stored) == oracle_prefix(tokens)


def test_any_two_flipped_bits_are_seen():
    """The certain part of the bound: public keys are odd, and no two of the first `SURE_PUBLIC_WORDS` have a sum or a
    difference that is 0 modulo 2**33; the next one does, so the number is the largest."""
    keys = hashing.keys(hashing.SURE_PUBLIC_WORDS + 1)
    assert bool((keys & 1).all())
    assert unsigned(keys[:3]) == [oracle_finaliser(0x243F6A8885A308D3 + i) | 1 for i in range(3)]
    low = keys & ((1 << 33) - 1)
    # Equal exactly for a pair whose sum or difference is 0.
    folded = torch.minimum(low, (1 << 33) - low)
    assert len(folded[:-1].unique()) == hashing.SURE_PUBLIC_WORDS
    assert len(folded.unique()) == hashing.SURE_PUBLIC_WORDS
    assert hashing.SURE_WORDS <= hashing.SURE_PUBLIC_WORDS


# Layouts: sources over tensors that also hold bytes of no slot, wherever the layout allows it.


def rows(dtype: torch.dtype, width: int, gap: int = 0) -> Callable[[int, str], tuple[KVSource, ...]]:
    """Row pools of K and V: ``width`` elements a slot and ``gap`` between two."""

    def make(slots: int, device: str) -> tuple[KVSource, ...]:
        out = []
        for half in "kv":
            tensor = torch.zeros(slots, width + gap, dtype=torch.uint8, device=device)
            if dtype is not torch.uint8:
                tensor = torch.zeros(slots, width + gap, dtype=torch.float32, device=device).to(dtype)
            size = tensor.element_size()
            out.append(KVSource(tensor, half, 0, width * size, (width + gap) * size, dtype=dtype))
        return tuple(out)

    return make


def heads_first(slots: int, device: str) -> tuple[KVSource, ...]:
    """Pages of 4 slots, one chunk a head: ``[pages, heads, 4, 12]``."""
    pages = -(-slots // 4)
    tensor = torch.zeros(pages, 3, 4, 12, dtype=torch.bfloat16, device=device)
    return (KVSource(tensor, "kv", 0, 24, 24, 4, 288, chunks=3, chunk_stride_bytes=96, dtype=torch.bfloat16),)


def heads_first_odd(slots: int, device: str) -> tuple[KVSource, ...]:
    """The same with 7 bytes a head: each chunk has a tail."""
    tensor = torch.zeros(-(-slots // 4), 2, 4, 7, dtype=torch.uint8, device=device)
    return (KVSource(tensor, "kv", 0, 7, 7, 4, 56, chunks=2, chunk_stride_bytes=28),)


def packed(slots: int, device: str) -> tuple[KVSource, ...]:
    """DeepSeek-V4: pages of 64 slots, 576 bytes of data each, then 8 bytes of scales each, then padding."""
    stride = 64 * 584 + 64
    tensor = torch.zeros(-(-slots // 64), stride, dtype=torch.uint8, device=device)
    data = KVSource(tensor, "kv", 0, 576, 576, page_size=64, page_stride_bytes=stride)
    return (data, KVSource(tensor, "kv_scale", 0, 8, 8, 64, stride, offset_bytes=64 * 576))


def paged(slots: int, device: str) -> tuple[KVSource, ...]:
    """K and V in one tensor by page, ``[pages, 2, 16, 40]``."""
    tensor = torch.zeros(-(-slots // 16), 2, 16, 40, dtype=torch.bfloat16, device=device)
    return tuple(KVSource(tensor, half, 0, 80, 80, 16, 2560, offset_bytes=i * 1280) for i, half in enumerate("kv"))


LAYOUTS: dict[str, Callable[[int, str], tuple[KVSource, ...]]] = {
    "rows_bf16": rows(torch.bfloat16, 128),
    "rows_bf16_gap": rows(torch.bfloat16, 24, 3),
    "rows_fp8": rows(torch.float8_e4m3fn, 128),
    "rows_fp8_tail": rows(torch.float8_e4m3fn, 66),
    "rows_one_byte": rows(torch.uint8, 1),
    "rows_13_bytes": rows(torch.uint8, 13),
    "rows_13_bytes_gap": rows(torch.uint8, 13, 2),
    "heads_first": heads_first,
    "heads_first_odd": heads_first_odd,
    "packed": packed,
    "paged": paged,
}


def state_of(sources: tuple[KVSource, ...], slots: int) -> RegionState:
    """Canary's memory for these sources, every slot written."""
    config = CanaryConfig(ring_rows=1 << 14)
    device = sources[0].tensor.device
    state = RegionState(Region("r", slots, sources), 0, Shared.allocate(config, device), config)
    state.records[:, POSITION] = int(State.WRITTEN)
    list_slots(state, range(slots))
    return state


def flat_bytes(source: KVSource) -> torch.Tensor:
    """All bytes of the source's tensor."""
    return source.tensor.view(torch.uint8).view(-1)


def byte_indices(source: KVSource, slots: int) -> torch.Tensor:
    """Index in `flat_bytes` of each byte of each slot, ``[slots, slot_bytes]``, by `KVSource`'s formula."""
    slot = torch.arange(slots)[:, None, None]
    chunk, byte = torch.arange(source.chunks)[:, None], torch.arange(source.chunk_bytes)
    index = (
        source.offset_bytes
        + slot // source.page_size * source.page_stride_bytes
        + slot % source.page_size * source.slot_stride_bytes
        + chunk * source.chunk_stride_bytes
        + byte
    )
    return index.view(slots, source.slot_bytes)


def every_bit(backend: Backend, layout: str, device: str) -> None:
    """Flips bit ``i`` of a slot in slot ``i``, for all bits of a slot at once, in one source after the other."""
    bits = 8 * max(s.slot_bytes for s in LAYOUTS[layout](1, "cpu"))
    sources = LAYOUTS[layout](bits, device)
    state = state_of(sources, bits)
    generator = torch.Generator().manual_seed(1)
    covered = torch.zeros(0, dtype=torch.int64)
    for column, source in enumerate(sources):
        flat = flat_bytes(source)
        flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=generator))
        covered = torch.cat((covered, byte_indices(source, bits).flatten() + (column << 40)))
    assert len(covered.unique()) == len(covered)
    backend.baseline(state)
    for column, source in enumerate(sources):
        bit = torch.arange(source.slot_bytes * 8)
        place = byte_indices(source, bits)[bit, bit // 8].to(device)
        mask = (1 << (bit % 8)).to(torch.uint8).to(device)
        flat = flat_bytes(source)
        flat[place] ^= mask
        assert findings(backend, state) == {(slot, column) for slot in bit.tolist()}
        flat[place] ^= mask
    # Bytes between the slots are nobody's.
    for tensor in {id(s.tensor): s for s in sources}.values():
        flat = flat_bytes(tensor)
        free = torch.ones(len(flat), dtype=torch.bool)
        for source in sources:
            if source.tensor is tensor.tensor:
                free[byte_indices(source, bits).flatten()] = False
        flat[free.to(device)] ^= 0xFF
    assert findings(backend, state) == set()


def findings(backend: Backend, state: RegionState) -> set[tuple[int, int]]:
    """(slot, source) of each finding of a scrub of all slots, each once and all of them changed bytes."""
    state.shared.counters.zero_()
    state.shared.ring.zero_()
    backend.scrub(state)
    found = [row for row in state.shared.ring.tolist() if row[Row.SEQUENCE]]
    assert {row[Row.KIND] for row in found} <= {Kind.BYTES}
    assert len(found) == int(state.shared.counters[Kind.BYTES])
    pairs = {(row[Row.SLOT], row[Row.SOURCE]) for row in found}
    assert len(pairs) == len(found)
    return pairs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_bit_is_seen(layout):
    """Each bit of a slot, in each source of each layout, is found by the scrub where it is; bytes between slots are
    not looked at."""
    every_bit(torch_backend(), layout, "cpu")


@pytest.mark.parametrize("layout", ["rows_one_byte", "rows_13_bytes", "heads_first_odd"])
def test_every_bit_is_seen_by_the_kernels(layout):
    """The same by the kernels; on the interpreter the smallest layouts, those with tails."""
    every_bit(triton_backend(), layout, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_bit_is_seen_on_the_gpu(layout):
    """The same by the compiled kernels, in every layout."""
    every_bit(triton_backend(), layout, "cuda")


# Random corruptions: each makes another content of `[n, SLOT_BYTES]`, in place of what was recorded.

SLOT_BYTES = 256
WORDS = SLOT_BYTES // 4


def words_replaced(data: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """2 to 9 words replaced by random ones."""
    return _at_words(data, g, lambda shape: torch.randint(0, 1 << 32, shape, generator=g, device=data.device))


def bits_flipped(data: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """One bit each flipped in 2 to 9 words: another bit in each, or the same."""
    one = torch.randint(0, 32, (len(data), 1), generator=g, device=data.device)
    same = torch.rand(len(data), 1, generator=g, device=data.device) < 0.5

    def masks(shape: tuple[int, int]) -> torch.Tensor:
        other = torch.randint(0, 32, shape, generator=g, device=data.device)
        return 1 << torch.where(same, one, other)

    return _at_words(data, g, masks, flip=True)


def signs_flipped(data: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """The top bit flipped in 2 to 9 words: the worst case of the bound."""
    return _at_words(data, g, lambda shape: torch.full(shape, 1 << 31, device=data.device), flip=True)


def _at_words(
    data: torch.Tensor, g: torch.Generator, values: Callable[[tuple[int, int]], torch.Tensor], flip: bool = False
) -> torch.Tensor:
    words = data.view(torch.int32).long() & 0xFFFFFFFF
    # Distinct words: a random start and stride, WORDS being a power of two and strides odd.
    count = torch.randint(2, 10, (len(data), 1), generator=g, device=data.device)
    start = torch.randint(0, WORDS, (len(data), 1), generator=g, device=data.device)
    stride = torch.randint(0, WORDS // 2, (len(data), 1), generator=g, device=data.device) * 2 + 1
    step = torch.arange(9, device=data.device)
    where = (start + step * stride) % WORDS
    new, old = values((len(data), 9)), words.gather(1, where)
    words.scatter_(1, where, torch.where(step < count, old ^ new if flip else new, old))
    return words.to(torch.int32).view(torch.uint8)


def bytes_shifted(data: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """Rows moved by 1 to 255 bytes within themselves."""
    by = torch.randint(1, SLOT_BYTES, (len(data), 1), generator=g, device=data.device)
    return data.gather(1, (torch.arange(SLOT_BYTES, device=data.device) + by) % SLOT_BYTES)


def slots_swapped(data: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """Each slot has another one's bytes."""
    return data.roll(int(torch.randint(1, len(data), (1,), generator=g, device=data.device)), 0)


def zeros(data: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """All-zero rows."""
    return torch.zeros_like(data)


def ones(data: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """All-one rows."""
    return torch.full_like(data, 255)


def tail_lost(data: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """A transfer that broke off: zeros from some byte on."""
    end = torch.randint(0, SLOT_BYTES, (len(data), 1), generator=g, device=data.device)
    return data * (torch.arange(SLOT_BYTES, device=data.device) < end)


CORRUPTIONS = (
    words_replaced, bits_flipped, signs_flipped, bytes_shifted, slots_swapped, zeros, ones, tail_lost,
)  # fmt: skip
PER_BATCH = 10_000


def contents(seed: int, g: torch.Generator, count: int) -> torch.Tensor:
    """What pools hold: noise, bfloat16 of a normal distribution, or few different small values."""
    if seed % 3 == 0:
        return torch.randint(0, 256, (count, SLOT_BYTES), dtype=torch.uint8, generator=g, device=g.device)
    if seed % 3 == 1:
        normal = torch.randn(count, SLOT_BYTES // 2, generator=g, device=g.device)
        return normal.to(torch.bfloat16).view(torch.uint8)
    return torch.randint(0, 3, (count, SLOT_BYTES), dtype=torch.uint8, generator=g, device=g.device)


def missed(trials: int) -> tuple[int, int]:
    """How many corruptions were tried, and how many left the fingerprint as it was. Those that left the bytes as they
    were don't count."""
    tried = unseen = 0
    g = torch.Generator().manual_seed(7)
    for batch in range(10 * trials // PER_BATCH):
        data = contents(batch, g, PER_BATCH)
        before = fingerprint_bytes(data, SLOT_BYTES, 5)
        # Swapped layers: another source's bytes, with its salt or, as the device sees them, with this one's.
        others = [contents(batch + 1, g, PER_BATCH), *(corrupt(data, g) for corrupt in CORRUPTIONS)]
        for column, other in enumerate(others):
            changed = (other != data).any(1)
            after = fingerprint_bytes(other, SLOT_BYTES, 5)
            tried += int(changed.sum())
            unseen += int((changed & (after == before)).sum())
            if column == 0:
                tried += PER_BATCH
                unseen += int((fingerprint_bytes(data, SLOT_BYTES, 6) == before).sum())
        if tried >= trials:
            break
    return tried, unseen


def test_no_corruption_is_missed():
    """Ten million corruptions of nine sorts: some 15 s on one core."""
    tried, unseen = missed(10_000_000)
    assert tried >= 10_000_000
    assert unseen == 0


@pytest.mark.gpu
def test_no_corruption_is_missed_on_the_gpu():
    """The scrub's own kernel over a pool, whose slots are all corrupted at once, ten million of them and more."""
    slots, tried, batch = 200_000, 0, 0
    pool = torch.zeros(slots, SLOT_BYTES, dtype=torch.uint8, device="cuda")
    state = state_of((KVSource(pool, "k", 0, SLOT_BYTES, SLOT_BYTES),), slots)
    backend = triton_backend()
    g = torch.Generator(device="cuda").manual_seed(7)
    while tried < 10_000_000:
        data = contents(batch, g, slots)
        pool.copy_(data)
        backend.baseline(state)
        for corrupt in CORRUPTIONS:
            other = corrupt(data, g)
            pool.copy_(other)
            changed = int((other != data).any(1).sum())
            state.shared.counters.zero_()
            backend.scrub(state)
            assert int(state.shared.counters[Kind.BYTES]) == changed, corrupt.__name__
            assert int(state.shared.counters[Counter.CHECKED_BYTES]) == slots * SLOT_BYTES
            tried += changed
        batch += 1
