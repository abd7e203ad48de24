"""Recurrent states that are looked at now and then, as by default, on real SGLang."""

import pytest

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
    engine.serve(prompts=engine.setup.traffic(0, 3), new_tokens=6)
    assert engine.findings()["violations"] == []
