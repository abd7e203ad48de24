"""Tables of recurrent states, from made-up batches; `test_stores` has states themselves."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from canary_sglang.pools.mamba import MambaStates

pytestmark = [pytest.mark.without_engine, pytest.mark.beyond_ci("make test")]


def test_padding_has_the_tables_that_forwards_have():
    """In shape, types and strides, so that what a start compiles is what serving needs."""
    lengths = torch.tensor([3, 0]), torch.tensor([1, 2])
    requests = SimpleNamespace(
        req_index_to_mamba_index_mapping=torch.tensor([0, 4, 5], dtype=torch.int32),
        mamba_pool=SimpleNamespace(size=8),
    )
    guard = MambaStates(requests, "mamba", MagicMock())
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(name="DECODE"), req_pool_indices=torch.tensor([1, 2]), input_ids=torch.zeros(3),
        mamba_cow_src_indices=torch.tensor([7]), mamba_cow_dst_indices=torch.tensor([5]), mamba_track_indices=None,
        mamba_track_mask=None,
    )  # fmt: skip
    try:
        going_on = guard.table(batch, *lengths)
        batch.forward_mode.name = "EXTEND"
        reusing = guard.table(batch, *lengths)
        for real, padding in zip((going_on, reusing), guard.padding(2), strict=True):
            assert padding.entries.dtype == real.entries.dtype
            assert padding.entries.stride()[-1] == real.entries.stride()[-1]
            assert padding.rows.dtype == real.rows.dtype
            names = ("page_size", "ring_slots", "stored_tokens", "pool_page")
            assert [getattr(padding, n) for n in names] == [getattr(real, n) for n in names]
            assert (padding.write_slots is None) == (real.write_slots is None)
    finally:
        guard.close()
