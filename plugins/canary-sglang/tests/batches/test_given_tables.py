"""Lists that SGLang's Triton backend makes of `req_to_token`, on Triton's interpreter: right ones are silent, wrong
ones are told."""

import pytest
from engines.setups import TRITON

pytestmark = pytest.mark.timeout(900)
BEYOND = pytest.mark.beyond_ci("the same comparison of mha, and with vLLM and Transformers")

ALWAYS = {"CANARY_TABLE_INTERVAL": "1", "CANARY_READ_CHECK": "0"}
SMALL = {"attention_backend": "triton", "dtype": "float32", "triton_attention_num_kv_splits": 1}
FEW = {"prompts": 4, "new_tokens": 3, "shared": 8}
KINDS = {
    "mha": {"options": SMALL, "environment": TRITON, **FEW},
    "swa": {"options": SMALL, "environment": TRITON, **FEW},
    "mla": {"options": {"triton_attention_num_kv_splits": 1}, **FEW},
    "pages": {"options": SMALL, **FEW},
}
"""Fields beside those of a setup."""


@pytest.mark.parametrize("name", ["mha", *(pytest.param(name, marks=BEYOND) for name in KINDS if name != "mha")])
def test_right_lists_are_silent_and_wrong_ones_told(name, launch):
    """Clean traffic compares a list in every forward. Then a list with one entry of another request, and one that is a
    step old: told with request, position, both slots and the list's name."""
    engine = launch(KINDS[name], like=name, **ALWAYS)
    setup = engine.setup
    for seed in (0, 0):
        engine.serve(prompts=setup.traffic(seed), new_tokens=setup.new_tokens)
    found = engine.findings()
    assert found["violations"] == []
    assert found["stats"]["tables_compared"] == found["stats"]["forwards"] > 5
    assert found["stats"]["lengths_compared"] == found["stats"]["forwards"]
    assert {"kv_indptr of TritonAttnBackend", "qo_indptr of TritonAttnBackend"} <= set(engine.table_names())
    assert "tables_left_out" not in {event["name"] for event in engine.events()}

    done = engine.stale_table(what="entry", prompts=setup.traffic(2, 4)[2:])
    wrong = [v for v in done["violations"] if v["kind"] == "read_table" and v["region"] == "full"]
    assert {(v["request"], v["position"]) for v in wrong} == {(done["requests"][-1], done["position"])}
    assert {(v["slot"], v["stored_value"]) for v in wrong} == {(done["wrong"], done["right"])}
    assert {v["detail"] for v in wrong} == {"kv_indices of TritonAttnBackend"}

    done = engine.stale_table(what="old", prompts=setup.traffic(3, 4)[2:])
    wrong = [v for v in done["violations"] if v["kind"] == "read_table"]
    assert wrong
    assert {v["detail"] for v in wrong} == {"kv_indices of TritonAttnBackend"}

    done = engine.stale_table(what="short", prompts=setup.traffic(5, 4)[2:])
    (wrong,) = [v for v in done["violations"] if v["kind"] == "read_length" and v["region"] == "full"]
    assert wrong["request"] == done["requests"][-1]
    assert wrong["stored_value"] - wrong["found_value"] == 1
    assert wrong["detail"] == "kv_indptr of TritonAttnBackend"

    if name == "swa":
        done = engine.stale_table(what="window", prompts=setup.traffic(4, 4)[2:])
        wrong = [v for v in done["violations"] if v["kind"] == "read_table"]
        assert {(v["region"], v["request"]) for v in wrong} == {("swa", done["requests"][0])}
        assert {v["detail"] for v in wrong} == {"window_kv_indices of TritonAttnBackend"}


@BEYOND
@pytest.mark.parametrize("name", ["mamba2", "gated_delta", "kimi_delta", "short_conv"])
def test_right_lists_of_recurrent_states_are_silent(name, start):
    """The list of states that the kernels of recurrent layers are given is compared with SGLang's map from requests to
    states, in turns with the list of KV slots where there is one. That a wrong one is told is shown by the museum:
    ``states_of_a_batch_exchanged``."""
    engine = start(name, **ALWAYS)
    for seed in (0, 0):
        engine.serve(prompts=engine.setup.traffic(seed, 4), new_tokens=engine.setup.new_tokens)
    found = engine.findings()
    assert found["violations"] == []
    assert found["stats"]["tables_compared"] == found["stats"]["forwards"] > 5
    told = {name.partition(" of ")[0] for name in engine.table_names()}
    assert "mamba_cache_indices" in told
    assert len(told) == 1 + (name == "kimi_delta")


@BEYOND
@pytest.mark.parametrize("name", ["mha", "swa"])
def test_of_a_backend_that_reads_the_engine_s_table_lengths_are_compared(name, launch):
    """SGLang's own default on a CPU has no lists to compare, which is told once; how many keys it reads for each row is
    compared in every forward."""
    engine = launch({}, like=name, **ALWAYS)
    engine.serve(prompts=engine.setup.traffic(0), new_tokens=4)
    engine.serve(prompts=engine.setup.traffic(0), new_tokens=4)
    told = [event for event in engine.events() if event["name"] == "tables_left_out"]
    assert [(e["backend"], e["reason"]) for e in told] == [
        ("TorchNativeAttnBackend", "it makes no table: it reads req_to_token itself")
    ]
    found = engine.findings()
    assert found["violations"] == []
    assert found["stats"]["lengths_compared"] == found["stats"]["forwards"] > 5
    assert "tables_compared" not in found["stats"]
    assert engine.table_names() == ["keys of TorchNativeAttnBackend"]


@BEYOND
@pytest.mark.parametrize("name", ["eagle", "eagle_tree", "mixed", "radix_off"])
def test_lengths_of_drafts_and_of_mixed_batches_are_no_finding(name, start):
    """Verifications of drafted tokens, forwards of the draft model, and decodes beside chunks: what is sure is compared
    in every forward of the served model, the rest is left out."""
    engine = start(name, **ALWAYS)
    for seed in (0, 0, 1):
        engine.serve(prompts=engine.setup.traffic(seed), new_tokens=engine.setup.new_tokens)
    found = engine.findings()
    assert found["violations"] == []
    assert found["stats"]["lengths_compared"] > 5
