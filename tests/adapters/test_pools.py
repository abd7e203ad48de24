import pytest
import torch

from canary_adapters import (
    GrowingPool,
    JoinedPools,
    LayerTensors,
    PackedPage,
    PackedPool,
    PagedPool,
    Part,
    RegionPool,
    RowPool,
    WindowPool,
    kv_layers,
    row_source,
    stacked_layers,
)
from canary_core import AttachError
from canary_core.region import Region, RegionKind, Role, Uncovered

ROWS = RowPool("swa", kv_layers([torch.zeros(9, 4)], [torch.zeros(9, 4)]))

UNEVEN_PAGES = kv_layers([torch.zeros(6, 2, 4)], [torch.zeros(3, 4, 4)])
PAGES = kv_layers([torch.zeros(6, 2, 4)], [torch.zeros(6, 2, 4)])

NINE, EIGHT = [torch.zeros(9, 2, 4) for _ in range(2)], [torch.zeros(8, 2, 4) for _ in range(2)]


def _tensors(*shape, n=2, dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype) for _ in range(n)]


class TestRowPool:
    def test_every_layer_and_half_is_a_source(self, oracle):
        """K and V with scales and an index: one region, each tensor a source with its role."""
        layers = [
            LayerTensors(
                layer,
                {"k": torch.zeros(9, 2, 4, dtype=torch.uint8), "v": torch.zeros(9, 2, 4, dtype=torch.uint8)},
                scales={"k_scale": torch.zeros(9, 2)},
                index={"index": torch.zeros(9, 3)},
                dtype=torch.float8_e4m3fn,
            )
            for layer in (1, 4)
        ]
        (region,) = RowPool("kv", layers, null_slot=0).regions()
        assert [s.name for s in region.sources] == [
            f"{half}.{layer}" for layer in (1, 4) for half in ("k", "v", "k_scale", "index")
        ]
        assert [s.role for s in region.sources[:4]] == [Role.DATA, Role.DATA, Role.SCALE, Role.INDEX]
        assert [s.dtype for s in region.sources[:3]] == [torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float32]
        assert (region.slots, region.null_slot, region.kind) == (9, 0, RegionKind.FULL)
        for source in region.sources:
            oracle.agrees(source, dict(enumerate(source.tensor)))

    def test_a_null_block(self):
        """The padding slots may be a range; a step in it is refused."""
        layers = kv_layers(_tensors(9, 4), _tensors(9, 4))
        (region,) = RowPool("kv", layers, null_slot=range(2, 6)).regions()
        assert (region.null_slot, region.null_slots) == (2, 4)
        (window,) = WindowPool(RowPool("kv", layers, null_slot=range(2, 6)), 3).regions()
        assert (window.null_slot, window.null_slots) == (2, 4)
        (window,) = WindowPool(RowPool("kv", layers, null_slot=range(2, 6)), 3, null_slot=0).regions()
        assert (window.null_slot, window.null_slots) == (0, 1)
        with pytest.raises(AttachError, match="one after another"):
            RowPool("kv", layers, null_slot=range(2, 6, 2)).regions()

    def test_spare_rows_are_told(self):
        """Rows beyond the slots are uncovered memory with their size."""
        pool = RowPool("kv", kv_layers(_tensors(9, 2, 4), _tensors(9, 2, 4)), slots=7)
        assert pool.regions()[0].slots == 7
        assert [(u.name, u.size_bytes) for u in pool.uncovered()] == [
            (f"kv/{name}", 64) for name in ("k.0", "v.0", "k.1", "v.1")
        ]
        assert RowPool("kv", kv_layers(_tensors(9, 2, 4), _tensors(9, 2, 4))).uncovered() == ()

    def test_interleaved_layers(self, oracle):
        """Transformers' views: shifted, overlapping, one flat tensor, each slot the layer's own."""
        page, layers, blocks = 4, 3, 5
        flat = torch.zeros(blocks * layers * 2 * page, 2, 3, dtype=torch.bfloat16)
        keys = [flat[(2 * i) * page :] for i in range(layers)]
        values = [flat[(2 * i + 1) * page :] for i in range(layers)]
        rows = 2 * layers * page
        (region,) = RowPool("full", kv_layers(keys, values), pool_page=(rows, page)).regions()
        assert region.slots == blocks * page
        assert region.pool_bytes == flat.nbytes
        for source in region.sources:
            slots = {b * page + i: source.tensor[b * rows + i] for b in range(blocks) for i in range(page)}
            oracle.agrees(source, slots)

    @pytest.mark.parametrize(
        ("call", "facts"),
        [
            pytest.param(
                lambda: RowPool("kv", kv_layers(NINE, EIGHT)).regions(),
                ["'kv'", "9 in k.0", "8 in v.0"],
                id="slots_differ",
            ),
            pytest.param(
                lambda: RowPool("kv", kv_layers(NINE, EIGHT), slots=9).regions(),
                ["9", "v.0 has 8"],
                id="more_slots_than_rows",
            ),
            pytest.param(lambda: RowPool("kv", []).regions(), ["'kv'", "no tensors"], id="no_layers"),
            pytest.param(lambda: kv_layers(NINE, EIGHT[:1]), ["1 and 2"], id="unequal_halves"),
            pytest.param(
                lambda: RowPool("kv", kv_layers(NINE, NINE)).regions(), ["kv/k.0", "kv/v.0"], id="the_same_tensor_twice"
            ),
            pytest.param(
                lambda: RowPool("kv", kv_layers(NINE, NINE), pool_page=(0, 1)), ["'kv'", "(0, 1)"], id="pool_page"
            ),
            pytest.param(
                lambda: RowPool("kv", kv_layers(NINE, NINE[::-1]), null_slot=9).regions(),
                ["null_slot 9", "9 slots"],
                id="null_slot_beyond_the_rows",
            ),
        ],
    )
    def test_what_does_not_fit_is_refused(self, call, facts, refusal):
        """Counts that differ, slots that aren't there, no layers, unequal halves, a tensor that is there twice."""
        refusal(call, *facts)


class TestPagedPool:
    @pytest.mark.parametrize("half_dim", [0, 1, -5])
    def test_stacked_halves(self, half_dim, oracle):
        """[2, pages, ...] and [pages, 2, ...]: both halves are covered, all bytes of the pool."""
        shape = (2, 5, 4, 3, 6) if half_dim != 1 else (5, 2, 4, 3, 6)
        pools = _tensors(*shape)
        (region,) = PagedPool("kv", stacked_layers(pools, half_dim)).regions()
        assert (region.slots, [s.name for s in region.sources]) == (20, ["k.0", "v.0", "k.1", "v.1"])
        assert region.pool_bytes == sum(p.nbytes for p in pools)
        for source in region.sources:
            oracle.agrees(source, {p * 4 + i: source.tensor[p, i] for p in range(5) for i in range(4)})

    def test_heads_first_with_scales(self, oracle):
        """Scales share the data's page and slot dimensions."""
        layer = LayerTensors(0, {"k": torch.zeros(5, 3, 4, 8)}, scales={"k_scale": torch.zeros(5, 3, 4)})
        (region,) = PagedPool("kv", [layer], slot_dim=2, null_slot=0).regions()
        for source in region.sources:
            oracle.agrees(source, {p * 4 + i: source.tensor[p, :, i] for p in range(5) for i in range(4)})

    @pytest.mark.parametrize(
        ("call", "facts"),
        [
            pytest.param(
                lambda: PagedPool("kv", UNEVEN_PAGES).regions(),
                ["2 in k.0", "4 in v.0", "page size"],
                id="page_sizes_differ",
            ),
            pytest.param(lambda: stacked_layers(_tensors(3, 2, 4)), ["(3, 2, 4)", "half_dim"], id="not_two_halves"),
            pytest.param(lambda: stacked_layers(_tensors(2, 2, 4), 3), ["dimension 3"], id="no_such_half_dim"),
            pytest.param(
                lambda: PagedPool("kv", PAGES, slot_dim=5).regions(), ["(0, 5)", "slot_dim"], id="no_such_slot_dim"
            ),
        ],
    )
    def test_what_does_not_fit_is_refused(self, call, facts, refusal):
        """Page sizes that differ at the same slot count, halves that aren't two."""
        refusal(call, *facts)


class TestRegionPool:
    def test_gives_what_it_was_given(self):
        """A region of any kind, with its map, and what was left out beside it."""
        source = row_source(torch.zeros(6, 4), Part("kv", 0))
        region = Region("c4", 6, (source,), RegionKind.COMPRESSED, null_slot=0, tokens_per_slot=4)
        left_out = Uncovered("c4/rest", 8, "spare rows")
        pool = RegionPool(region, [left_out])
        assert tuple(pool.regions()) == (region,)
        assert tuple(pool.uncovered()) == (left_out,)
        assert tuple(RegionPool(region).uncovered()) == ()
        assert JoinedPools([pool]).regions() == (region,)

    def test_sources_that_share_bytes_are_refused(self, refusal):
        """Two sources of one region can't be the same memory."""
        rows = torch.zeros(6, 4)
        region = Region("full", 6, (row_source(rows, Part("k", 0)), row_source(rows, Part("v", 0))))
        refusal(lambda: RegionPool(region), "full/k.0", "full/v.0")


class TestWindowPool:
    def test_ring(self):
        """Any pool becomes a window; its sources stay."""
        layers = kv_layers(_tensors(6, 4, 2, 8), _tensors(6, 4, 2, 8))
        (region,) = WindowPool(PagedPool("swa", layers, null_slot=3), window_tokens=16).regions()
        assert (region.kind, region.window_tokens, region.slots) == (RegionKind.WINDOW, 16, 24)
        assert (region.slot_map, region.null_slot) == (None, 3)

    def test_slot_map(self):
        """The map from full slots and its evicted slot are the region's; the pool's spare rows are still told."""
        slot_map = torch.zeros(101, dtype=torch.int64)
        pool = WindowPool(RowPool("swa", kv_layers(_tensors(9, 4), _tensors(9, 4)), slots=8), 5, slot_map, null_slot=0)
        (region,) = pool.regions()
        assert region.slot_map is slot_map
        assert region.null_slot == 0
        assert len(pool.uncovered()) == 4

    @pytest.mark.parametrize(
        ("call", "facts"),
        [
            pytest.param(lambda: WindowPool(ROWS, 0).regions(), ["'swa'", "got 0"], id="no_window"),
            pytest.param(
                lambda: WindowPool(ROWS, 4, torch.zeros(5)).regions(), ["slot_map", "float32"], id="map_of_floats"
            ),
            pytest.param(
                lambda: WindowPool(WindowPool(ROWS, 4), 4).regions(),
                ["'swa'", "window already"],
                id="window_of_a_window",
            ),
        ],
    )
    def test_what_does_not_fit_is_refused(self, call, facts, refusal):
        """No window, a map of floats, a window of a window."""
        refusal(call, *facts)


def test_packed_pool(refusal):
    """Each layer gives a data and a scale source; padding is told as uncovered."""
    layout = PackedPage(64, 576, 8)
    layers = [LayerTensors(i, {"kv": torch.zeros(3, 37440, dtype=torch.uint8)}) for i in (2, 5)]
    pool = PackedPool("c4", layers, layout, null_slot=0)
    (region,) = pool.regions()
    assert [s.name for s in region.sources] == ["kv.2", "kv_scale.2", "kv.5", "kv_scale.5"]
    assert (region.slots, region.slot_bytes) == (192, 2 * 584)
    assert [(u.name, u.size_bytes) for u in pool.uncovered()] == [("c4/kv.2", 3 * 64), ("c4/kv.5", 3 * 64)]
    refusal(lambda: PackedPool("c4", layers, PackedPage(64, 578, 8)).regions(), "37440", str(64 * 586))


def test_growing_pool():
    """The region has all its slots from the first, empty tensor on; growing changes addresses only."""
    for tokens in (0, 1, 5):
        layers = kv_layers(_tensors(2, 3, tokens, 4), _tensors(2, 3, tokens, 4))
        (region,) = GrowingPool("cache", layers, max_tokens=8).regions()
        assert region.slots == 16
        assert {(s.present, s.chunks, s.chunk_bytes, s.slot_words) for s in region.sources} == {(tokens, 3, 16, 12)}


def test_joined_pools(refusal):
    """Groups of one engine: names differ, memory is apart unless they are declared to take turns on it."""
    flat = torch.zeros(24, 2, 4)
    full = PagedPool("full", [LayerTensors(0, {"kv": flat.view(6, 4, 2, 4)})])
    window = WindowPool(PagedPool("window", [LayerTensors(1, {"kv": flat.view(6, 4, 2, 4)})]), 4)
    refusal(lambda: JoinedPools([full, window]).regions(), "full/kv.0", "window/kv.1")
    refusal(lambda: JoinedPools([full, full]).regions(), "['full', 'full']")
    joined = JoinedPools([full, window], sharing=[frozenset({"full", "window"})])
    assert [r.name for r in joined.regions()] == ["full", "window"]
    spare = RowPool("rows", [LayerTensors(2, {"kv": torch.zeros(4, 2)})], slots=3)
    assert [u.size_bytes for u in JoinedPools([full, spare]).uncovered()] == [8]


def test_pools_of_pools_name_the_engines_tensors_as_their_parts_do():
    """A window's pool, and several pools together; ready-made pools alone can't know the engine's names."""

    class Named(RowPool):
        def __init__(self, name):
            self.tensors = {f"{name}_buffer": torch.zeros(9, 4)}
            super().__init__(name, [LayerTensors(0, {"k": self.tensors[f"{name}_buffer"]})])

        def pool_tensors(self):
            return self.tensors

    joined = JoinedPools([Named("full"), WindowPool(Named("swa"), 4), ROWS])
    assert joined.pool_tensors().keys() == {"full_buffer", "swa_buffer"}
    assert ROWS.pool_tensors() == {}
