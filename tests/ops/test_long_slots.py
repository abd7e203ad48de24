"""Slots that kernels read one at a time, by sources abreast: recurrent states, and whatever has as many bytes."""

import pytest
import torch
from ops.scenario import differences, list_slots, ring_rows, twin
from ops.test_equal import run

from canary_core import BatchView, CanaryConfig, KVSource, Region, RegionKind, SlotTable
from canary_core.ops.backends import torch_backend, triton_backend
from canary_core.ops.kernels import fingerprint, read_check, scrub, tiles
from canary_core.ops.state import RegionState, Shared
from canary_core.records import Counter, Cursor, Kind

OPS = ("check", "read_check", "fingerprint", "record", "scrub")
SLOTS = 24


@pytest.fixture(params=[tiles.Tile(1, 4, 4, columns=2, abreast=1), tiles.Tile(1, 4, 2, columns=8, abreast=4)])
def all_long(monkeypatch, request):
    """Every slot is a long one, and has several rounds; where sources are fewer than abreast, rows are empty."""
    monkeypatch.setattr(tiles, "LONG_WORDS", 0)
    monkeypatch.setattr(tiles, "LONG_STATE_WORDS", 0)
    for name, slots in (("WRITE_TILES", 4), ("READ_CHECK_TILES", tiles.READ_TILE), ("SCRUB_TILES", 1)):
        usual = getattr(tiles, name).usual
        for module in (fingerprint, read_check, scrub):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, tiles.Tiles(usual, request.param._replace(slots=slots)))


def states(width_bytes: int, pad_bytes: int, device: str = "cpu", layers: int = 3) -> RegionState:
    """A region of random recurrent states, ``width_bytes`` in each of ``layers``, whose bytes are all known."""
    sources = tuple(
        KVSource(
            torch.randint(0, 256, (SLOTS, width_bytes + pad_bytes), dtype=torch.uint8, device=device), "ssm", layer,
            chunk_bytes=width_bytes, slot_stride_bytes=width_bytes + pad_bytes,
        )
        for layer in range(layers)
    )  # fmt: skip
    config = CanaryConfig(ring_rows=64, non_finite=False)
    region = Region("mamba", SLOTS, sources, RegionKind.STATE, null_slot=0)
    return RegionState(region, 0, Shared.allocate(config, torch.device(device)), config)


def forward(rows: int, prefix: int, new: int, device: str = "cpu") -> tuple[BatchView, SlotTable]:
    """Each of ``rows`` requests goes on from ``prefix`` tokens by ``new``."""
    table = SlotTable(torch.arange(1, rows + 1, device=device)[:, None], ring_slots=1)
    batch = BatchView(
        prefix_lens=torch.full((rows,), prefix, device=device),
        new_lens=torch.full((rows,), new, device=device),
        token_ids=torch.randint(0, 50, (rows * new,), device=device),
        writers=torch.arange(rows, dtype=torch.int32, device=device),
        tables={"mamba": table},
    )
    return batch, table


def compare_ops(width_bytes: int, pad_bytes: int, rows: int, device: str = "cpu") -> set[int]:
    """Runs a prefill and two decodes on both back ends, with a flip in the last byte of a state before the second and a
    lost write in it, comparing after every op; gives the kinds that were found."""
    reference, kernels = torch_backend(), triton_backend()
    state = states(width_bytes, pad_bytes, device)
    list_slots(state, range(SLOTS))
    for word in (Cursor.SCRUB_SLOTS, Cursor.SCRUB_RUNNING, Cursor.SCRUB_PASS):
        state.cursors[word] = SLOTS
    other = twin(state)
    reference.baseline(state)
    kernels.baseline(other)
    assert differences(state, other, 0) == []
    for step, (prefix, new) in enumerate(((0, 7), (7, 1), (8, 1))):
        batch, table = forward(rows, prefix, new, device)
        for op in OPS:
            if op == "read_check" and step == 2:
                state.sources[1].tensor[2, width_bytes - 1] ^= 0x80
            if op == "fingerprint":
                for source in state.sources:
                    source.tensor[1 + (step == 2) :, ::3] += 1
            state.cursors[Cursor.PROBE] = step + 1
            other = twin(state)
            arguments = (True,) if op == "scrub" else (batch, table)
            getattr(reference, op)(state, *arguments)
            getattr(kernels, op)(other, *arguments)
            assert differences(state, other, batch.tokens) == [], f"step {step}, op {op}"
    other = twin(state)
    listed = torch.tensor([3, 3, -1, SLOTS], device=device)
    reference.verify(state, listed)
    kernels.verify(other, listed)
    assert differences(state, other, 0) == []
    state.sources[0].tensor[3, :] ^= 1
    reference.adopt(state, listed)
    kernels.adopt(other, listed)
    assert differences(state, other, 0) == []
    return {row[0] for row in ring_rows(state)}


@pytest.mark.usefixtures("all_long")
@pytest.mark.parametrize("seed", [3, 37])
def test_kernels_equal_reference_on_long_slots(seed):
    """On random layouts (strips, chunks, pages, tails of a byte), with slots that several rows read or write, every op
    leaves the same bits behind."""
    run(seed, "cpu")


@pytest.mark.parametrize(("width_bytes", "pad_bytes", "rows"), [(8192, 0, 3), (20_004, 0, 18), (20_005, 2, 3)])
def test_states_equal_reference(width_bytes, pad_bytes, rows):
    """By the tile that is used: states of one load aligned to 16 bytes, and of two rounds, aligned to 4 with a last
    load that is mostly masked, and to 1 with a last word of one byte. A flip in the last byte is found."""
    assert compare_ops(width_bytes, pad_bytes, rows) >= {Kind.BYTES}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("width_bytes", "pad_bytes"), [(1 << 18, 0), (48 << 10, 16), (20_004, 0), (6004, 0), (4101, 2)]
)
@pytest.mark.parametrize("rows", [3, 18])
def test_states_equal_reference_on_the_gpu(width_bytes, pad_bytes, rows):
    """The same on a GPU, compiled."""
    assert compare_ops(width_bytes, pad_bytes, rows, "cuda") >= {Kind.BYTES}


@pytest.mark.gpu
@pytest.mark.usefixtures("all_long")
@pytest.mark.parametrize("seed", [3, 25, 37])
def test_kernels_equal_reference_on_long_slots_on_the_gpu(seed):
    """The fuzz on a GPU, compiled."""
    run(seed, "cuda")


@pytest.mark.parametrize("words", range(1, 17))
def test_a_strip_of_any_width_is_compared_whole(words):
    """A narrow source that goes with a wide one, such as its scales, equals its fingerprint as long as no byte of it
    changes, however many words it has."""
    wide = torch.randint(0, 256, (9, 256), dtype=torch.uint8)
    narrow = torch.randint(0, 256, (9, words * 4), dtype=torch.uint8)
    sources = (
        KVSource(wide, "k", 0, chunk_bytes=256, slot_stride_bytes=256),
        KVSource(narrow, "k_scale", 0, chunk_bytes=words * 4, slot_stride_bytes=words * 4),
    )
    config = CanaryConfig(ring_rows=64)
    state = RegionState(Region("r", 9, sources), 0, Shared.allocate(config, torch.device("cpu")), config)
    kernels = triton_backend()
    kernels.baseline(state)
    state.records[:, :] = 1
    kernels.verify(state, torch.arange(9))
    assert int(state.shared.counters[: Counter.FIRST].sum()) == 0
    assert int(state.shared.counters[Counter.CHECKED_BYTES]) == 9 * (256 + words * 4)
