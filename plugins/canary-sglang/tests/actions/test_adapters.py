"""Requests with LoRA adapters that SGLang's scheduler computes again, with the same adapter."""

import pytest
from tools.adapters import ADAPTERS
from tools.recompute_verdicts import ALL, clean, told
from tools.recomputes import OPTIONS, QUIET

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("recompute")]


def test_adapters_are_well_and_one_that_changed_under_a_kept_cache_is_told(launch):
    """Two adapters and none in one batch are well. Once the weights of one are others, what it left is told at a hit,
    and without one, and nothing of the rest; and once it is unloaded, nothing of it is computed again."""
    engine = launch({"options": {**OPTIONS, **ADAPTERS}}, **{**QUIET, **ALL})
    done = engine.adapted_traffic(rounds=44)
    clean(done)
    assert all(done["by_adapter"].get(f"{who} same", 0) >= 3 for who in ("None", "id-of-a", "id-of-b", "id-of-c"))
    done = engine.adapted_faults()
    assert done["verdicts"] == ["differs", "same", "same", "same", "differs", "same", "same"], done
    assert told(done) == [(1, 0, "a hits", "brought"), (1, 0, "a before", "everywhere")]
    (answer,) = engine.unloaded_adapter()["answers"]
    assert (answer["verdict"], "its adapter is not loaded" in answer["reason"]) == ("unjudged", True)
