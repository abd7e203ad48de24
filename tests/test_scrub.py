"""The scrub's budget, and what it says of itself."""

import pytest
from support.toy import ToyEngine

from canary_core import Canary, CanaryConfig, ConfigError
from canary_core.budget import ScrubBudget


@pytest.mark.parametrize(
    ("text", "budget"),
    [("1%", ScrubBudget(share=0.01)), ("64MiB", ScrubBudget(step_bytes=64 << 20)), ("0", ScrubBudget())],
)
def test_budgets_are_a_share_of_time_or_bytes(text, budget):
    """Both ways of saying how much the scrub may do are understood."""
    assert ScrubBudget.parse(text) == budget


@pytest.mark.parametrize("text", ["fast", "101%", "-1", "5 parsecs"])
def test_a_budget_that_is_none_is_refused_by_name(text):
    """A bad budget names the setting and what was got."""
    with pytest.raises(ConfigError, match="CANARY_SCRUB_BUDGET") as raised:
        ScrubBudget.parse(text)
    assert repr(text) in str(raised.value)


def test_the_scrub_goes_round_and_says_how_often():
    """A budget in bytes passes as many slots after each forward, wraps around the pool, and is told as coverage."""
    engine = ToyEngine()
    region = engine.region()
    per_step = 10
    canary = Canary([region], CanaryConfig.load(scrub_budget=str(per_step * region.slot_bytes)), writers=engine.writers)
    engine.submit("a", list(range(3, 35)))
    for _ in range(20):
        step = engine.batch(chunk=2)
        canary.pre_forward(step)
        engine.forward(step)
        canary.post_forward(step)
        canary.end_step()
    canary.drain()
    passed = canary.stats()["scrubbed_slots"]
    assert passed == 20 * per_step
    assert canary.scrub_stats()["scrub_coverage"] == passed / region.slots
    assert canary.scrub_stats()["scrub_period_s"] > 0
