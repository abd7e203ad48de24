"""Page tables that SGLang's FlashAttention-3 backend makes of `req_to_token`: right ones are silent, wrong ones are
told. The backend is SGLang's own; its attention kernels are stand-ins in plain torch (`engines.fake_flash_attention`),
which read KV through the page tables that are compared."""

import pytest
from engines.setups import TRITON, since

pytestmark = pytest.mark.timeout(900)
BEYOND = pytest.mark.beyond_ci("the same comparison of mha")

ALWAYS = {"CANARY_TABLE_INTERVAL": "1", "CANARY_READ_CHECK": "0"}
SMALL = {"attention_backend": "fa3", "max_total_tokens": 112, "chunked_prefill_size": 32}
KINDS = {
    "mha": SMALL,
    "pages": SMALL,
    "swa": SMALL,
    "swa_pages": {**SMALL, "page_size": 4},
    "mla": SMALL,
}
"""Options beside those of a setup."""
LENS = {"cache_seqlens_int32 of FlashAttentionBackend", "cu_seqlens_q of FlashAttentionBackend"}


@pytest.mark.parametrize("name", ["mha", *(pytest.param(name, marks=BEYOND) for name in KINDS if name != "mha")])
def test_right_page_tables_are_silent_and_wrong_ones_told(name, launch):
    """Random traffic with prefix hits, chunked prefill and retraction compares a page table in every forward. Then a
    table with a page of another request is told: request, positions, slots and the table's name; so is a wrong entry
    of a window's."""
    fields = {"options": {**KINDS[name], "schedule_conservativeness": 0.1}, "environment": TRITON}
    engine = launch(fields, like=name.split("_")[0], **ALWAYS)
    setup = engine.setup
    done = engine.storm(seed=1, steps=150, prefix=20, new_tokens=24)
    assert done["cached"] > 0
    # See `RETRACTS`: what the tables are broken in needs all of its requests.
    assert done["retracted"] > 0 or since("0.5.22")
    found = engine.findings()
    assert found["violations"] == []
    assert found["stats"]["tables_compared"] == found["stats"]["forwards"] > 100
    assert "tables_left_out" not in {event["name"] for event in engine.events()}
    windows = {"swa_page_table of FlashAttentionBackend"} if name.startswith("swa") else set()
    assert found["stats"]["lengths_compared"] == found["stats"]["forwards"]
    assert set(engine.table_names()) == {"page_table of FlashAttentionBackend"} | windows | LENS

    done = engine.stale_table(what="entry", prompts=setup.traffic(2, 4)[2:], backend="fa3_eager")
    wrong = [v for v in done["violations"] if v["kind"] == "read_table" and v["region"] == "full"]
    places = range(done["position"], done["position"] + done["positions"])
    assert {(v["request"], v["position"]) for v in wrong} == {(done["requests"][-1], p) for p in places}
    slots = {(done["wrong"] + i, done["right"] + i) for i in range(len(places))}
    assert {(v["slot"], v["stored_value"]) for v in wrong} == slots
    assert {v["detail"] for v in wrong} == {"page_table of FlashAttentionBackend"}

    done = engine.stale_table(what="short", prompts=setup.traffic(5, 4)[2:], backend="fa3_eager")
    wrong = [v for v in done["violations"] if v["kind"] == "read_length" and v["region"] == "full"]
    assert {(v["request"], v["detail"]) for v in wrong} == {
        (done["requests"][-1], "cache_seqlens_int32 of FlashAttentionBackend")
    }
    assert [v["stored_value"] - v["found_value"] for v in wrong] == [1]

    if windows:
        done = engine.stale_table(what="window", prompts=setup.traffic(4, 4)[2:], backend="fa3_eager")
        wrong = [v for v in done["violations"] if v["kind"] == "read_table"]
        assert {(v["region"], v["request"]) for v in wrong} == {("swa", done["requests"][0])}
        assert {v["detail"] for v in wrong} == windows


@BEYOND
@pytest.mark.parametrize(
    ("mode", "graph"), [("DECODE", True), ("TARGET_VERIFY", True), ("EXTEND", True), ("TARGET_VERIFY", False)]
)
@pytest.mark.parametrize("name", KINDS)
def test_page_tables_are_those_of_req_to_token(name, mode, graph, launch):
    """In the buffers that CUDA graphs read, what is compared is what `req_to_token` and the map of window slots say,
    entry by entry: SGLang's own kernels (in Triton's interpreter) fill them for captures of several sizes and then for
    batches of others, with padded rows, longer and shorter than those before. No graph runs. So are those of drafted
    tokens without a graph."""
    fields = {"options": {**KINDS[name], "max_running_requests": 12}, "environment": TRITON}
    engine = launch(fields, like=name.split("_")[0], **ALWAYS)
    done = engine.graph_tables(mode=mode, graph=graph)
    assert done["why_not"] is None
    windows = {"swa_page_table of FlashAttentionBackend"} if name.startswith("swa") else set()
    assert done["seen"].keys() == {"page_table of FlashAttentionBackend"} | windows
    assert all(looked > 500 for looked, _ in done["seen"].values())
    assert all(wrong == 0 for _, wrong in done["seen"].values())
    assert done["lens"].keys() == LENS
    assert all(looked > 50 and wrong == 0 for looked, wrong in done["lens"].values())


@BEYOND
def test_models_that_never_forget_a_prompt_are_left_out(launch):
    """For them a graph's page table has the prompt and the window, without what is between: not what `req_to_token`
    has at these positions. So the backend is left out, and its reason told."""
    fields = {"options": {**KINDS["mha"], "max_running_requests": 12}, "environment": TRITON}
    done = launch(fields, like="mha", **ALWAYS).graph_tables(mode="DECODE", graph=True, name="prefill_aware")
    assert done["seen"]["page_table of FlashAttentionBackend"][1] > 0
    assert done["why_not"] == "its page tables leave out what the window has passed"
