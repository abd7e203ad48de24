"""Tables of recurrent states, from made-up batches; `test_stores` has states themselves."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from canary_sglang.compat.caches import states_fit
from canary_sglang.pools.mamba import MambaStates, recompute_refusal

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
    states = MambaStates(requests, "mamba", MagicMock())
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(name="DECODE"), req_pool_indices=torch.tensor([1, 2]), input_ids=torch.zeros(3),
        mamba_cow_src_indices=torch.tensor([7]), mamba_cow_dst_indices=torch.tensor([5]), mamba_track_indices=None,
        mamba_track_mask=None,
    )  # fmt: skip
    try:
        going_on = states.before(batch, view)
        batch.forward_mode.name = "EXTEND"
        reusing = states.before(batch, view)
        for views in zip(
            (going_on, reusing), states.padding(replace(view, prefix_lens=none, new_lens=none)), strict=True
        ):
            real, padding = (v.tables["mamba"] for v in views)
            assert padding.entries.dtype == real.entries.dtype
            assert padding.entries.stride()[-1] == real.entries.stride()[-1]
            assert padding.rows.dtype == real.rows.dtype
            names = ("page_size", "ring_slots", "stored_tokens", "pool_page")
            assert [getattr(padding, n) for n in names] == [getattr(real, n) for n in names]
            assert (padding.write_slots is None) == (real.write_slots is None)
    finally:
        states.close()


class MambaPool:
    """As far as it is asked whether its states are known."""

    def __init__(self, ring: object = None) -> None:
        self.replayssm_write_pos = ring


@pytest.mark.parametrize(
    ("options", "requests", "said"),
    [
        ({}, {"mamba_pool": MambaPool()}, None),
        ({}, {}, None),
        ({"speculative_algorithm": "EAGLE"}, {"mamba_pool": MambaPool()}, "speculation beside recurrent states"),
        ({}, {"mamba_pool": MambaPool(), "mamba_ckpt_pool": object()}, "int8 checkpoints"),
        ({}, {"mamba_pool": MambaPool(torch.zeros(4))}, "ReplaySSM"),
    ],
)
def test_states_kept_in_other_ways_are_not_computed_again(options, requests, said):
    """The reason says which way; a model without states has none."""
    runner = SimpleNamespace(server_args=SimpleNamespace(**options), req_to_token_pool=SimpleNamespace(**requests))
    why = recompute_refusal(runner)
    assert why is None if said is None else said in str(why)


@pytest.mark.parametrize(
    ("free", "cached", "fits"), [(3, 0, (True, True)), (2, 1, (False, True)), (1, 1, (False, False))]
)
def test_an_internal_request_takes_states_as_any_other(monkeypatch, free, cached, fits):
    """As many as SGLang provides for a request with a prefix cache; free ones alone for a proof of an idle engine."""
    common = SimpleNamespace(MAMBA_STATE_PER_REQ_PREFIX_CACHE=3, MAMBA_STATE_PER_REQ_NO_CACHE=1)
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sglang.srt", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache", SimpleNamespace(common=common))
    allocator = SimpleNamespace(schedulable_available_size=lambda: free)
    cache = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(mamba_allocator=allocator), supports_mamba=lambda: True,
        mamba_evictable_size=lambda: cached,
    )  # fmt: skip
    assert (states_fit(cache, evicts=False), states_fit(cache, evicts=True)) == fits
