"""Real SGLang on a GPU with its overlap scheduler, which is its default: a forward is issued before the results of the
one before are known, on a stream of its own, and decodes come from CUDA graphs, those of a draft model too. Bytes are
not compared before each forward, as by default: checks are issued after the forward then, and run beside it.

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
    "window": {"model": "gpu_cohere2"},
    "mla": {"model": "gpu_deepseek_v2"},
    "pages": {"page_size": 16, "kv_cache_dtype": "fp8_e4m3"},
    "eagle": EAGLE,
    "standalone": {**EAGLE, "speculative_algorithm": "STANDALONE", "draft_model": "gpu_llama_small"},
}
SPECULATING = ("eagle", "standalone")
GUARD = {"CANARY_SCRUB_BUDGET": "64MiB", "CANARY_READ_CHECK": "0"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(SETUPS))
def test_random_traffic_under_the_overlap_scheduler_raises_nothing(name, launch, record_property):
    """Requests with shared prefixes end, are aborted and retracted while a forward that writes to their slots is in
    flight: nothing is found in any pool, and afterwards Canary and the allocator know the same slots to be free."""
    options = {"device": "cuda", "model": "gpu_llama", "disable_overlap_schedule": False, "max_total_tokens": 640}
    engine = launch({"options": {**options, **SETUPS[name]}, "patience_s": 400}, **GUARD)
    served = engine.storm_overlapped(seed=5, turns=600, new_tokens=40)
    found = engine.findings()
    record_property("checked_slots", found["stats"]["checked_slots"])
    record_property("verifies", served["verifies"])
    assert found["violations"] == []
    assert served["aborted"] > 0
    assert found["stats"]["checked_slots"] > 0
    assert found["stats"]["unknown_slots"] == 0
    assert (served["verifies"] > 0) == (name in SPECULATING)
    assert all(draft["checked_slots"] > 0 for draft in found["drafts"].values())
    assert len(found["drafts"]) == (name in SPECULATING)
    assert all(region["differences"] == [] for region in engine.ownership().values())
    assert {"disabled", "unguarded_forward", "lifetime_off"}.isdisjoint(event["name"] for event in engine.events())


@pytest.mark.gpu
@pytest.mark.parametrize(("what", "kind"), [("double_free", "double_free"), ("free_in_use", "freed")])
def test_a_misused_allocator_is_found_beside_the_forward(what, kind, launch):
    """A slot that is freed twice, or while its request still decodes: found in that forward, though its check is issued
    after it. The request is named."""
    engine = launch({"options": {"device": "cuda", "model": "gpu_llama"}, "prompts": 4, "patience_s": 400}, **GUARD)
    assert engine.serve(prompts=engine.setup.traffic(0, 4), new_tokens=8)
    assert engine.findings()["violations"] == []
    done = engine.misuse(what=what, prompts=engine.setup.traffic(1, 4)[2:])
    found = [v for v in done["violations"] if v["kind"] == kind]
    assert {v["slot"] for v in found} == set(done["slots"])
    if what == "free_in_use":
        assert {v["request"] for v in found} == {done["requests"][-1]}
