"""Recurrent states that are looked at now and then, as by default, on real SGLang."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from canary_sglang.states import StateGuard

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("interval", ["3", "64"])
def test_states_looked_at_now_and_then_raise_nothing(start, interval):
    """Traffic with shared prefixes, whose states stay in the cache as of a forward that wasn't looked at and are reused
    by others: nothing is found, and no state is read without a record."""
    engine = start("short_conv", CANARY_STATE_INTERVAL=interval)
    setup, steps, cached = engine.setup, 0, 0
    for seed in (0, 0, 1):
        served = engine.serve(prompts=setup.traffic(seed), new_tokens=setup.new_tokens)
        steps += served["steps"]
        cached += sum(served["cached"])
    engine.storm(seed=8, steps=60, prefix=20, new_tokens=24)
    found = engine.findings()
    assert found["violations"] == []
    assert cached > 0
    assert found["stats"]["unknown_slots"] == 0
    assert found["stats"]["checked_forwards"] >= steps * len(setup.served)


def test_states_with_our_triton_kernels_raise_nothing(launch):
    """The same with our kernels, interpreted here, which are launched for states, too, when the session starts."""
    engine = launch({"environment": {"CANARY_BACKEND": "triton"}}, "short_conv", CANARY_STATE_INTERVAL="4")
    steps = engine.serve(prompts=engine.setup.traffic(0, 3), new_tokens=6)["steps"]
    found = engine.findings()
    assert found["violations"] == []
    assert found["stats"]["checked_forwards"] == steps * len(engine.setup.served)


@pytest.mark.without_engine
def test_padding_has_the_tables_that_forwards_have():
    """In shape, types and strides, so that what a start compiles is what serving needs."""
    lengths = torch.tensor([3, 0]), torch.tensor([1, 2])
    requests = SimpleNamespace(
        req_index_to_mamba_index_mapping=torch.tensor([0, 4, 5], dtype=torch.int32),
        mamba_pool=SimpleNamespace(size=8),
    )
    guard = StateGuard(requests, "mamba", MagicMock())
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
