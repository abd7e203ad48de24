"""Real SGLang on a GPU with its overlap scheduler, which is its default: a forward is issued before the results of the
one before are known, on a stream of its own, and decodes come from CUDA graphs, those of a draft model too.

``python3 -m pytest -m gpu plugins/canary-sglang/tests/gpu/test_overlap.py``: up to a minute an engine.
"""

import pytest

EAGLE = {
    "speculative_algorithm": "EAGLE",
    "draft_model": "gpu_llama_draft",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
SETUPS = {
    "llama": {},
    "eagle": EAGLE,
    "standalone": {**EAGLE, "speculative_algorithm": "STANDALONE", "draft_model": "gpu_llama_small"},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(SETUPS))
def test_random_traffic_under_the_overlap_scheduler_raises_nothing(name, launch, record_property):
    """Requests with shared prefixes end, are aborted and retracted while a forward that writes to their slots is in
    flight: nothing is found in any pool, and afterwards Canary and the allocator know the same slots to be free."""
    options = {"device": "cuda", "model": "gpu_llama", "disable_overlap_schedule": False, "max_total_tokens": 640}
    engine = launch({"options": {**options, **SETUPS[name]}, "patience_s": 400}, CANARY_SCRUB_BUDGET="64MiB")
    served = engine.storm_overlapped(seed=5, turns=600, new_tokens=40)
    found = engine.findings()
    record_property("checked_slots", found["stats"]["checked_slots"])
    record_property("verifies", served["verifies"])
    assert found["violations"] == []
    assert served["aborted"] > 0
    assert found["stats"]["checked_slots"] > 0
    assert found["stats"]["unknown_slots"] == 0
    assert (served["verifies"] > 0) == (name != "llama")
    assert all(draft["checked_slots"] > 0 for draft in found["drafts"].values())
    assert len(found["drafts"]) == (name != "llama")
    assert engine.ownership()["full"]["differences"] == []
    assert {"disabled", "unguarded_forward", "lifetime_off"}.isdisjoint(event["name"] for event in engine.events())
