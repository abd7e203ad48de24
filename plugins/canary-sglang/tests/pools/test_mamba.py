"""Tables of recurrent states, from made-up batches; `test_stores` has states themselves."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from canary_sglang.pools.mamba import MambaStates

from canary_core import BatchView

pytestmark = [pytest.mark.without_engine, pytest.mark.beyond_ci("make test")]


def test_padding_has_the_tables_that_forwards_have():
    """In shape, types and strides, so that what a start compiles is what serving needs."""
    view = BatchView(
        prefix_lens=torch.tensor([3, 0]), new_lens=torch.tensor([1, 2]), token_ids=torch.zeros(3, dtype=torch.int64),
        writers=torch.tensor([0, 1]), tables={},
    )  # fmt: skip
    requests = SimpleNamespace(
        req_index_to_mamba_index_mapping=torch.tensor([0, 4, 5], dtype=torch.int32),
        mamba_pool=SimpleNamespace(size=8),
    )
    none = torch.zeros(2, dtype=torch.int64)
    guard = MambaStates(requests, "mamba", MagicMock())
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(name="DECODE"), req_pool_indices=torch.tensor([1, 2]), input_ids=torch.zeros(3),
        mamba_cow_src_indices=torch.tensor([7]), mamba_cow_dst_indices=torch.tensor([5]), mamba_track_indices=None,
        mamba_track_mask=None,
    )  # fmt: skip
    try:
        going_on = guard.before(batch, view)
        batch.forward_mode.name = "EXTEND"
        reusing = guard.before(batch, view)
        for views in zip(
            (going_on, reusing), guard.padding(replace(view, prefix_lens=none, new_lens=none)), strict=True
        ):
            real, padding = (v.tables["mamba"] for v in views)
            assert padding.entries.dtype == real.entries.dtype
            assert padding.entries.stride()[-1] == real.entries.stride()[-1]
            assert padding.rows.dtype == real.rows.dtype
            names = ("page_size", "ring_slots", "stored_tokens", "pool_page")
            assert [getattr(padding, n) for n in names] == [getattr(real, n) for n in names]
            assert (padding.write_slots is None) == (real.write_slots is None)
    finally:
        guard.close()
