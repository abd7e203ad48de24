import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from canary_adapters import PackedPage, Part, growing_source, packed_page_source, paged_source, row_source
from canary_core.errors import AttachError
from canary_core.region import KVSource, Region, Role

PACKED = torch.zeros(3, 100, dtype=torch.uint8)

POOL = torch.zeros(5, 4, 3, 7)

K = Part("k", 3)
DTYPES = [torch.uint8, torch.int8, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32, torch.float64]


@st.composite
def strided(draw: st.DrawFn, least: int = 1, most: int = 4) -> Tensor:
    """A view with permuted dimensions, gaps between and around elements, of odd and unit sizes."""
    dims = draw(st.integers(least, most))
    sizes = draw(st.lists(st.integers(1, 5), min_size=dims, max_size=dims))
    steps = draw(st.lists(st.sampled_from([1, 1, 1, 2, 3]), min_size=dims, max_size=dims))
    before = draw(st.lists(st.sampled_from([0, 0, 1]), min_size=dims, max_size=dims))
    after = draw(st.lists(st.sampled_from([0, 0, 2]), min_size=dims, max_size=dims))
    base = torch.zeros(
        [b + (n - 1) * s + 1 + a for n, s, b, a in zip(sizes, steps, before, after, strict=True)],
        dtype=draw(st.sampled_from(DTYPES)),
    )
    cut = [slice(b, b + (n - 1) * s + 1, s) for n, s, b in zip(sizes, steps, before, strict=True)]
    return base[tuple(cut)].permute(draw(st.permutations(range(dims))))


class TestRows:
    @given(rows=strided())
    @settings(deadline=None)
    def test_any_strides(self, rows, oracle):
        """Every row's bytes are named exactly; refused only where they aren't equal chunks at one distance."""
        try:
            source = row_source(rows, K)
        except AttachError:
            assert not oracle.affine(rows, rows[0])
            return
        assert oracle.affine(rows, rows[0])
        oracle.agrees(source, dict(enumerate(rows)))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(1,), (7,), (63, 1), (5, 3), (9, 1, 7), (4, 2, 3, 5)])
    def test_contiguous_rows_are_one_chunk(self, shape, dtype, oracle):
        """One-byte tails and scalar rows included."""
        rows = torch.zeros(shape, dtype=dtype)
        source = row_source(rows, K)
        assert source.chunks == 1
        assert source.chunk_bytes == math.prod(shape[1:]) * dtype.itemsize
        oracle.agrees(source, dict(enumerate(rows)))

    def test_heads_strided_rows(self, oracle):
        """A pool of [heads, rows, dim] seen as [rows, heads, dim] is one chunk a head."""
        rows = torch.zeros(3, 11, 5, dtype=torch.bfloat16).transpose(0, 1)
        source = row_source(rows, K)
        assert (source.chunks, source.chunk_bytes, source.chunk_stride_bytes) == (3, 10, 110)
        oracle.agrees(source, dict(enumerate(rows)))

    @given(
        page=st.integers(1, 5).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(1, rows))),
        rows=st.integers(1, 23),
        shift=st.integers(0, 4),
    )
    @settings(deadline=None)
    def test_pages_of_several_layers_in_one_tensor(self, page, rows, shift, oracle):
        """Row n is slot n // rows * slots + n % rows; only whole pages count."""
        page_rows, page_slots = page
        pool = torch.zeros(rows + shift, 3, dtype=torch.bfloat16)[shift:]
        whole = [p for p in range(rows) if p * page_rows + page_slots <= rows]
        if not whole:
            with pytest.raises(AttachError):
                row_source(pool, K, page)
            return
        source = row_source(pool, K, page)
        slots = {p * page_slots + i: pool[p * page_rows + i] for p in whole for i in range(page_slots)}
        oracle.agrees(source, slots)
        Region("r", len(slots), (source,))

    def test_element_type(self):
        """A float tensor's own type is kept, bytes have none unless it is given."""
        assert row_source(torch.zeros(4, 2, dtype=torch.bfloat16), K).dtype == torch.bfloat16
        raw = torch.zeros(4, 6, dtype=torch.uint8)
        assert row_source(raw, K).dtype is None
        assert row_source(raw, Part("k", 0, torch.float8_e4m3fn)).dtype == torch.float8_e4m3fn
        assert row_source(raw, Part("k", 0, torch.bfloat16)).dtype == torch.bfloat16
        assert row_source(torch.zeros(4, dtype=torch.int64), K).dtype is None
        assert row_source(raw.view(torch.float8_e8m0fnu), K).dtype is None

    def test_part_names_the_source(self):
        """Half, layer and role end up in the source."""
        source = row_source(torch.zeros(4, 2), Part("k_scale", 7, role=Role.SCALE))
        assert (source.half, source.layer, source.role, source.name) == ("k_scale", 7, Role.SCALE, "k_scale.7")

    @pytest.mark.parametrize(
        ("call", "facts"),
        [
            pytest.param(lambda: row_source(torch.tensor(1.0), K), ["k.3", "()"], id="scalar"),
            pytest.param(lambda: row_source(torch.zeros(0, 4), K), ["k.3", "(0, 4)"], id="no_rows"),
            pytest.param(lambda: row_source(torch.zeros(4, 0), K), ["k.3", "(4, 0)"], id="empty_rows"),
            pytest.param(lambda: row_source(torch.zeros(4, 2, device="meta"), K), ["k.3", "meta"], id="meta"),
            pytest.param(lambda: row_source(torch.zeros(4, 4).to_sparse(), K), ["k.3", "sparse"], id="sparse"),
            pytest.param(
                lambda: row_source(torch.zeros(4, 4, 4, 4)[:, ::2, ::2, ::2], K),
                ["k.3", "(64, 32, 8, 2)"],
                id="three_strides",
            ),
            pytest.param(
                lambda: row_source(torch.zeros(1, 4).expand(3, 4), K),
                ["k.3", "slots 0 and 1", "expanded"],
                id="expanded_rows",
            ),
            pytest.param(
                lambda: row_source(torch.zeros(4, 1).expand(4, 3), K),
                ["k.3", "stride 0", "(1, 0)"],
                id="expanded_contents",
            ),
            pytest.param(
                lambda: row_source(torch.zeros(9).as_strided((3, 4), (2, 1)), K),
                ["slots 0 and 1"],
                id="overlapping_rows",
            ),
            pytest.param(
                lambda: row_source(torch.zeros(9).as_strided((1, 2, 4), (0, 2, 1)), K),
                ["share bytes"],
                id="overlapping_contents",
            ),
            pytest.param(
                lambda: row_source(torch.zeros(4, 2), K, (2, 3)),
                ["(2, 3)", "pool_page"],
                id="pool_page_wrong_way_round",
            ),
            pytest.param(
                lambda: row_source(torch.zeros(4, 2), K, (8, 5)),
                ["(4, 2)", "pool_page"],
                id="pool_page_beyond_the_rows",
            ),
            pytest.param(
                lambda: row_source(torch.zeros(4, 2), Part("k", 3, torch.float16)),
                ["float32", "float16"],
                id="another_float_type",
            ),
            pytest.param(
                lambda: row_source(torch.zeros(4, 3, dtype=torch.uint8), Part("k", 3, torch.float16)),
                ["3 bytes"],
                id="not_whole_elements",
            ),
            pytest.param(
                lambda: row_source(torch.zeros(4, 3, dtype=torch.uint8), Part("k", 3, torch.int8)),
                ["torch.int8"],
                id="not_a_float_type",
            ),
        ],
    )
    def test_what_does_not_fit_is_refused(self, call, facts, refusal):
        """What can't be described says what, what was got and what to do."""
        refusal(call, *facts)


class TestPages:
    @given(data=st.data(), pool=strided(least=2, most=5))
    @settings(deadline=None)
    def test_any_strides(self, data, pool, oracle):
        """Any two dimensions may be page and slot; the rest is contents, in any order in memory."""
        page_dim, slot_dim, *_ = data.draw(st.permutations(range(pool.dim())))
        page_first = pool.movedim((page_dim, slot_dim), (0, 1))
        try:
            source = paged_source(pool, K, page_dim, slot_dim - pool.dim())
        except AttachError:
            assert not oracle.affine(pool, page_first[0, 0])
            return
        assert oracle.affine(pool, page_first[0, 0])
        pages, page_size = page_first.shape[:2]
        assert source.page_size == page_size
        oracle.agrees(source, {p * page_size + i: page_first[p, i] for p, i in product(range(pages), range(page_size))})

    @pytest.mark.parametrize(
        ("shape", "view", "slot_dim", "chunks"),
        [
            ((5, 4, 3, 7), lambda t: t, 1, 1),
            ((5, 3, 4, 7), lambda t: t, 2, 3),
            ((2, 5, 4, 3, 7), lambda t: t[1], 1, 1),
            ((5, 2, 4, 3, 7), lambda t: t[:, 1], 1, 1),
            ((5, 2, 3, 4, 7), lambda t: t[:, 0], 2, 3),
            ((5, 3, 6, 4, 2), lambda t: t, 3, 18),
            ((5, 3, 7, 4), lambda t: t, 3, 21),
        ],
        ids=["nhd", "hnd", "stacked", "stacked_in_page", "stacked_hnd", "vllm_k_x", "k_transposed"],
    )
    def test_known_layouts(self, shape, view, slot_dim, chunks, oracle):
        """The layouts engines use, stacked halves by their views."""
        pool = view(torch.zeros(shape, dtype=torch.bfloat16))
        source = paged_source(pool, K, 0, slot_dim)
        assert source.chunks == chunks
        page_first = pool.movedim(slot_dim, 1)
        oracle.agrees(source, {p * 4 + i: page_first[p, i] for p in range(5) for i in range(4)})

    def test_static_cache(self, oracle):
        """[batch, heads, tokens, dim]: one page a row."""
        cache = torch.zeros(3, 2, 9, 5)
        source = paged_source(cache, K, 0, 2)
        oracle.agrees(source, {b * 9 + p: cache[b, :, p] for b in range(3) for p in range(9)})

    @pytest.mark.parametrize(
        ("call", "facts"),
        [
            pytest.param(lambda: paged_source(POOL, K, 0, 0), ["(0, 0)", "(5, 4, 3, 7)"], id="one_dimension_twice"),
            pytest.param(lambda: paged_source(POOL, K, 0, -4), ["(0, -4)"], id="the_same_from_behind"),
            pytest.param(lambda: paged_source(POOL, K, 0, 4), ["(0, 4)", "slot_dim"], id="no_such_dimension"),
            pytest.param(
                lambda: paged_source(POOL[..., ::2], K, 0, 2), ["k.3", "(5, 4, 3, 4)"], id="contents_at_two_strides"
            ),
            pytest.param(lambda: paged_source(torch.zeros(5), K), ["2 dimension", "(5,)"], id="too_few_dimensions"),
            pytest.param(
                lambda: paged_source(torch.zeros(1, 4, 3).expand(5, 4, 3), K), ["slots 0 and 4"], id="overlapping_pages"
            ),
        ],
    )
    def test_what_does_not_fit_is_refused(self, call, facts, refusal):
        """Dimensions that aren't there, pages that overlap, contents at two strides."""
        refusal(call, *facts)


class TestPackedPages:
    @pytest.mark.parametrize(
        ("pages", "layout", "padded"),
        [
            (3, PackedPage(64, 576, 8), 37440),
            (4, PackedPage(2, 576, 8), 1728),
            (3, PackedPage(64, 128, 4), 8448),
            (2, PackedPage(5, 7, 1), 43),
        ],
        ids=["c4", "c128", "dsa_indexer", "odd"],
    )
    def test_data_and_scales(self, pages, layout, padded, oracle):
        """Data at i * data_bytes, scales after all data; both strips by torch's own slicing."""
        pool = torch.zeros(pages, padded, dtype=torch.uint8)
        data, scale = packed_page_source(pool, Part("kv", 2), layout)
        assert (data.name, scale.name) == ("kv.2", "kv_scale.2")
        assert (data.role, scale.role) == (Role.DATA, Role.SCALE)
        strip = layout.page_size * layout.data_bytes
        size = layout.page_size
        slots = [(p, i) for p in range(pages) for i in range(size)]
        some = slots[:: max(1, len(slots) // 9)]
        for source, cut, width in (
            (data, pool[:, :strip], layout.data_bytes),
            (scale, pool[:, strip : layout.used_bytes], layout.scale_bytes),
        ):
            strips = cut.unflatten(1, (size, width))
            oracle.agrees(source, {p * size + i: strips[p, i] for p, i in some})

    def test_page_of_wider_elements(self, oracle):
        """Sizes are bytes whatever the tensor's dtype is."""
        pool = torch.zeros(3, 2, 8, dtype=torch.bfloat16)
        data, _ = packed_page_source(pool, K, PackedPage(3, 8, 2))
        assert data.page_stride_bytes == 32
        assert data.dtype is None
        oracle.agrees(data, {p * 3 + i: pool.flatten(1)[p, 4 * i : 4 * i + 4] for p in range(3) for i in range(3)})

    @pytest.mark.parametrize(
        ("call", "facts"),
        [
            pytest.param(
                lambda: packed_page_source(PACKED, K, PackedPage(64, 2, 1)),
                ["192", "100", "k.3"],
                id="layout_beyond_the_page",
            ),
            pytest.param(
                lambda: packed_page_source(PACKED[:, ::2], K, PackedPage(2, 2, 1)),
                ["contiguous", "(3, 50)"],
                id="pages_with_gaps",
            ),
            pytest.param(lambda: PackedPage(0, 576, 8), ["page_size=0"], id="empty_page"),
            pytest.param(
                lambda: packed_page_source(PACKED, Part("k", 3, torch.float16), PackedPage(4, 7, 1)),
                ["7 bytes", "float16"],
                id="not_whole_elements",
            ),
        ],
    )
    def test_what_does_not_fit_is_refused(self, call, facts, refusal):
        """A layout that needs more than a page, pages with gaps, impossible sizes."""
        refusal(call, *facts)


class TestGrowing:
    @given(
        shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 5), st.integers(1, 3)),
        order=st.sampled_from([(0, 1, 2, 3), (0, 2, 1, 3)]),
        spare=st.integers(0, 3),
    )
    @settings(deadline=None)
    def test_slots_and_chunks_do_not_depend_on_the_length(self, shape, order, spare, oracle):
        """The slot of (b, p) is b * max_tokens + p at every length, and a slot's chunks are the same ones."""
        batch, heads, tokens, dim = shape
        cache = torch.zeros([shape[d] for d in order], dtype=torch.bfloat16).permute(order)
        longest = max(tokens + spare, 1)
        source = growing_source(cache, K, longest)
        assert source.present == tokens
        assert (source.chunks, source.chunk_bytes) == (heads, dim * 2)
        Region("r", batch * longest, (source,))
        slots = {b * longest + p: cache[b, :, p] for b in range(batch) for p in range(tokens)}
        oracle.agrees(source, slots)
        assert all(oracle.named(source, s) == set() for s in range(batch * longest) if s not in slots)

    def test_other_dimension_order(self, oracle):
        """[tokens, batch, contents] works too."""
        cache = torch.zeros(4, 3, 6)
        source = growing_source(cache, K, 7, batch_dim=1, token_dim=0)
        oracle.agrees(source, {b * 7 + p: cache[p, b] for b in range(3) for p in range(4)})

    @pytest.mark.parametrize(
        ("call", "facts"),
        [
            pytest.param(
                lambda: growing_source(torch.zeros(2, 3, 5, 4), K, 4),
                ["max_tokens 4", "5 tokens"],
                id="longer_than_its_longest",
            ),
            pytest.param(lambda: growing_source(torch.zeros(2, 3, 0, 4), K, 0), ["max_tokens 0"], id="no_room"),
            pytest.param(lambda: growing_source(torch.tensor([]), K, 4), ["(0,)"], id="one_dimension"),
            pytest.param(lambda: growing_source(torch.zeros(0, 3, 5, 4), K, 9), ["(0, 3, 5, 4)"], id="no_rows"),
            pytest.param(
                lambda: growing_source(torch.zeros(2, 3, 5, 8)[..., ::2], K, 9),
                ["chunks"],
                id="contents_at_two_strides",
            ),
            pytest.param(
                lambda: growing_source(torch.zeros(2, 4, 4, 5, 8)[:, ::2, ::2], K, 9, token_dim=3),
                ["chunks"],
                id="heads_at_two_strides",
            ),
        ],
    )
    def test_what_does_not_fit_is_refused(self, call, facts, refusal):
        """A cache longer than its longest, one without its dimensions, one that isn't affine."""
        refusal(call, *facts)


def test_a_cut_last_page_needs_only_its_own_slots():
    """Storage that ends with the last slot of a part page is enough, one byte less is not."""
    for slots, stride, expected in [(5, 8, 8 + 2), (7, 8, 8 + 6), (5, 1, 6 + 2), (4, 8, 8)]:
        source = KVSource(torch.zeros(expected, dtype=torch.uint8), "k", 0, 2, 2, 4, stride)
        source.require_slots(slots)
        short = KVSource(torch.zeros(expected - 1, dtype=torch.uint8), "k", 0, 2, 2, 4, stride)
        with pytest.raises(AttachError):
            short.require_slots(slots)
