"""Real SGLang on a GPU: the lists and page tables that its CUDA graphs and its eager forwards read, compared with
`req_to_token` in every forward. What `tests/batches/test_given_tables.py` states for a CPU, and other backends.

``python3 -m pytest -m gpu plugins/canary-sglang/tests/gpu/test_given_tables.py``: up to a minute an engine.
"""

from pathlib import Path

import pytest

SETUPS = {
    "graphs": {},
    "eager": {"disable_cuda_graph": True},
    "pages": {"page_size": 16, "kv_cache_dtype": "fp8_e4m3"},
    "window": {"model": "gpu_cohere2"},
    "mla": {"model": "gpu_deepseek_v2"},
}
OTHERS = {
    "flashinfer": {"attention_backend": "flashinfer"},
    "flashinfer_window": {"attention_backend": "flashinfer", "model": "gpu_cohere2"},
    "fa3": {"attention_backend": "fa3"},
    "fa3_pages": {"attention_backend": "fa3", "page_size": 64},
    "fa3_window": {"attention_backend": "fa3", "model": "gpu_cohere2"},
    "fa3_mla": {"attention_backend": "fa3", "model": "gpu_deepseek_v2"},
    "fa3_eager": {"attention_backend": "fa3", "disable_cuda_graph": True},
}
"""Backends that SGLang's wheel may have no kernels for, or that are compiled when they are first used."""
TOLD_AS = {"flashinfer": "kv_indices of FlashInferAttnBackend", "fa3": "page_table of FlashAttentionBackend"}
SHORT_AS = {
    "flashinfer": "kv_indptr of FlashInferAttnBackend",
    "fa3": "cache_seqlens_int32 of FlashAttentionBackend",
}
EAGLE = {
    "speculative_algorithm": "EAGLE",
    "draft_model": "gpu_llama_draft",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
ALWAYS = {"CANARY_TABLE_INTERVAL": "1", "CANARY_SCRUB_BUDGET": "64MiB", "CANARY_READ_CHECK": "0"}


def fields(name, **options):
    """Of a `Setup`."""
    known = {"device": "cuda", "model": "gpu_llama", **(SETUPS | OTHERS).get(name, EAGLE), **options}
    return {"options": known, "prompts": 8, "new_tokens": 24, "shared": 300, "patience_s": 400}


def short_lengths(engine, backend, detail):
    """With the last request one token short in what the backend reads by: told once, as that."""
    done = engine.stale_table(what="short", prompts=engine.setup.traffic(5, 4)[2:], backend=backend)
    wrong = [v for v in done["violations"] if v["kind"] == "read_length" and v["region"] == "full"]
    assert [(v["request"], v["detail"]) for v in wrong] == [(done["requests"][-1], detail)]
    assert [v["stored_value"] - v["found_value"] for v in wrong] == [1]


def read_tables(done):
    """Findings of this kind."""
    return [v for v in done["violations"] if v["kind"] == "read_table"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETUPS)
def test_right_lists_are_silent_and_wrong_ones_told(name, launch, record_property):
    """Clean traffic compares a list in every forward, those in the buffers of CUDA graphs too. Then one entry of
    another request, and a list that is a step old: told with request, position, both slots and the list's name."""
    engine = launch(fields(name), **ALWAYS)
    setup, graphed = engine.setup, 0
    for seed in (0, 0, 1):
        served = engine.serve(prompts=setup.traffic(seed), new_tokens=setup.new_tokens)
        graphed += sum(served["graphed"].values())
    found = engine.findings()
    record_property("compared", found["stats"]["tables_compared"])
    assert found["violations"] == []
    assert found["stats"]["tables_compared"] == found["stats"]["lengths_compared"] == found["stats"]["forwards"]
    assert (graphed > 0) == (name != "eager")
    assert "tables_left_out" not in {event["name"] for event in engine.events()}

    done = engine.stale_table(what="entry", prompts=setup.traffic(2, 4)[2:])
    wrong = [v for v in read_tables(done) if v["region"] == "full"]
    assert {(v["request"], v["position"]) for v in wrong} == {(done["requests"][-1], done["position"])}
    assert {(v["slot"], v["stored_value"]) for v in wrong} == {(done["wrong"], done["right"])}
    assert {v["detail"] for v in wrong} == {"kv_indices of TritonAttnBackend"}

    done = engine.stale_table(what="old", prompts=setup.traffic(3, 4)[2:])
    assert {v["detail"] for v in read_tables(done)} == {"kv_indices of TritonAttnBackend"}

    short_lengths(engine, "triton", "kv_indptr of TritonAttnBackend")

    if name == "window":
        done = engine.stale_table(what="window", prompts=setup.traffic(4, 4)[2:])
        assert {(v["region"], v["request"]) for v in read_tables(done)} == {("swa", done["requests"][0])}
    engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", OTHERS)
def test_other_backends_are_compared_too(name, launch, record_property):
    """FlashInfer's lists and FlashAttention-3's page tables: clean traffic compares one in every forward. Then a wrong
    entry of those that a graph reads is told with request, position, both slots and the table's name; so is one of a
    window."""
    backend, _, kind = name.partition("_")
    if backend == "fa3":
        pytest.importorskip("sgl_kernel.flash_attn", exc_type=ImportError)
    elif not any(Path(pytest.importorskip("flashinfer").__file__).parent.glob("data/**/cutlass/util/command_line.h")):
        pytest.skip("FlashInfer compiles its kernels with headers of CUTLASS, which are not installed")
    engine = launch(fields(name), **ALWAYS)
    setup = engine.setup
    for seed in (0, 0, 1):
        engine.serve(prompts=setup.traffic(seed), new_tokens=setup.new_tokens)
    found = engine.findings()
    record_property("compared", found["stats"]["tables_compared"])
    assert found["violations"] == []
    assert found["stats"]["tables_compared"] == found["stats"]["lengths_compared"] == found["stats"]["forwards"]
    assert "tables_left_out" not in {event["name"] for event in engine.events()}
    assert TOLD_AS[backend] in engine.table_names()

    if kind != "eager":
        # Both have several pages of 64.
        done = engine.stale_table(what="entry", prompts=setup.traffic(2)[:2], backend=backend)
        wrong = [v for v in read_tables(done) if v["region"] == "full"]
        places = range(done["position"], done["position"] + done.get("positions", 1))
        assert {(v["request"], v["position"]) for v in wrong} == {(done["requests"][-1], p) for p in places}
        slots = {(done["wrong"] + i, done["right"] + i) for i in range(len(places))}
        assert {(v["slot"], v["stored_value"]) for v in wrong} == slots
        assert {v["detail"] for v in wrong} == {TOLD_AS[backend]}
    short_lengths(engine, "fa3_eager" if kind == "eager" else backend, SHORT_AS[backend])
    if kind == "window":
        done = engine.stale_table(what="window", prompts=setup.traffic(4, 4)[2:], backend=backend)
        assert {(v["region"], v["request"]) for v in read_tables(done)} == {("swa", done["requests"][0])}
    engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["graphs", "window", "mla", "eagle"])
def test_random_traffic_under_the_overlap_scheduler_raises_nothing(name, launch, record_property):
    """The scheduler writes to `req_to_token` for the next batch while a forward runs: a comparison comes before."""
    options = {"disable_overlap_schedule": False, "max_total_tokens": 640}
    engine = launch(fields(name, **options), **ALWAYS)
    engine.storm_overlapped(seed=5, turns=600, new_tokens=40)
    found = engine.findings()
    record_property("compared", found["stats"].get("tables_compared", 0))
    record_property("skipped", found["stats"].get("tables_skipped", 0))
    assert found["violations"] == []
    assert found["stats"].get("tables_compared", 0) > 100 or name == "eagle"
    assert "disabled" not in {event["name"] for event in engine.events()}
    engine.close()
