"""Real SGLang on a GPU: what a layer stores is still there when the forward has ended, in forwards that are not
replayed from a CUDA graph. What `tests/test_stores.py` states for a CPU.

``python3 -m pytest -m gpu plugins/canary-sglang/tests/gpu/test_stores.py``: up to a minute an engine.
"""

import pytest

SETUPS = {
    "graphs": {},
    "eager": {"disable_cuda_graph": True},
    "overlap": {"disable_overlap_schedule": False},
    "fp8": {"page_size": 16, "kv_cache_dtype": "fp8_e4m3"},
    "window": {"model": "gpu_cohere2"},
    "mla": {"model": "gpu_deepseek_v2"},
}
LOOKS = {"CANARY_STORE_CHECK": "true", "CANARY_SCRUB_BUDGET": "64MiB", "CANARY_READ_CHECK": "0"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETUPS)
def test_stores_are_looked_at(name, launch, record_property):
    """Clean traffic, prefills and decodes from graphs, is silent. Then the store of the last layer also changes what
    the first one has just stored: told at once, with the layer."""
    options = {"device": "cuda", "model": "gpu_llama", **SETUPS[name]}
    engine = launch({"options": options, "prompts": 8, "new_tokens": 24, "shared": 300, "patience_s": 400}, **LOOKS)
    for seed in (0, 0, 1):
        engine.serve(prompts=engine.setup.traffic(seed), new_tokens=engine.setup.new_tokens)
    found = engine.findings()
    noted = found["stats"].get("noted_stores", 0)
    record_property("noted_stores", noted)
    assert found["violations"] == []
    assert noted > 0
    engine.flush()
    slot = engine.scribble_within_a_forward(prompt=engine.setup.traffic(2)[0])
    found = engine.findings()["violations"]
    assert [(v["kind"], v["phase"], v["slot"], v["layer"]) for v in found] == [("bytes", "post_forward", slot, 0)]
