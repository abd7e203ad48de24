"""Tables of the benchmark, from made-up results."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.without_engine
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def repetition(turn: int, arm: str, rate: float) -> dict[str, object]:
    """One of the engine ``ours``."""
    about = {"config": "ours", "workload": "batch", "label": "64 x", "arm": arm, "turn": turn}
    return {**about, "decode_tokens_s": rate}


@pytest.mark.parametrize("events", [{"attached": 1}, {"attached": 1, "disabled": 2}])
def test_losses_are_those_of_pairs_and_a_canary_that_was_off_is_told(monkeypatch, events):
    """Pairs lose 1, 2 and 3 %; what a switched-off Canary did not cost isn't passed off as its cost."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import report

    results = [repetition(turn, "off", 100.0 * (turn + 1)) for turn in range(3)]
    results += [repetition(turn, "on", (100.0 - turn - 1) * (turn + 1)) for turn in range(3)]
    text = report.overhead([*results, {"config": "ours", "events": events, "stats": {}}])
    assert "| 2.00 % | 1.00 to 3.00 % |" in text
    assert ("NOT WHAT CANARY COSTS" in text) == ("disabled" in events)
