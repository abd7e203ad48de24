"""``CANARY_ON_VIOLATION=protect``: no token that was computed from KV found to be wrong is given out, on real SGLang
with its own event loops. Bits flip from outside, in SGLang's own tensors."""

import pytest
from engines.setups import TRITON
from tools.parked_flips import OPTIONS, PRIVATE, QUIET

pytestmark = pytest.mark.timeout(600)
LOOPS = pytest.mark.parametrize("loop", ["plain", "overlap"])
COMPARED = {"CANARY_READ_CHECK": "-1", "CANARY_SCRUB_BUDGET": "0", "CANARY_INCIDENT_LIMIT": "1"}
FINE = {"quarantine_failed": 0, "disabled": 0, "reporting_failed": 0}


def part(served, *names):
    """These numbers, and those of what must never happen."""
    return {name: served[name] for name in (*names, *FINE)}


@pytest.mark.older_release
@pytest.mark.where(pytest.mark.beyond_ci("the same with the overlap scheduler"), loop="plain")
@LOOPS
def test_no_wrong_answer_from_parked_kv_that_changed(launch, loop):
    """Bits flip in the prefix cache, each in a slot that the next request hits. With protect each answer is right, and
    none ends with an error; clean requests are not computed again."""
    engine = launch({"options": OPTIONS[loop]}, CANARY_ON_VIOLATION="protect", **QUIET)
    served = engine.serve_parked(count=15)
    assert (
        part(served, "right", "recomputed", "retracted", "flipped")
        == dict.fromkeys(("right", "recomputed", "retracted", "flipped"), 15) | FINE
    )
    clean = engine.serve_parked(count=30, seed=1, flips=False, together=4)
    assert part(clean, "right", "recomputed", "aborted", "retracted") == FINE | {
        "right": 30, "recomputed": 0, "aborted": 0, "retracted": 0,
    }  # fmt: skip
    assert clean["hit_slots"] > served["hit_slots"]


@pytest.mark.beyond_ci("that nothing is done by default, in test_quarantine")
def test_by_default_wrong_answers_are_given_out(launch):
    """What the tests beside would see without protect: the flips matter."""
    engine = launch({"options": OPTIONS["overlap"]}, **QUIET)
    served = engine.serve_parked(count=12)
    assert served["wrong"] > 3
    assert served["hit_slots"] == 0


@pytest.mark.beyond_ci("a tenth of it")
@LOOPS
def test_no_wrong_answer_of_many(launch, loop):
    """200 flips, and 300 clean requests."""
    engine = launch({"options": OPTIONS[loop]}, CANARY_ON_VIOLATION="protect", **QUIET)
    served = engine.serve_parked(count=200)
    assert part(served, "wrong", "kept") == FINE | {"wrong": 0, "kept": 0}
    assert served["right"] + served["error"] == 200
    clean = engine.serve_parked(count=300, seed=1, flips=False, together=4)
    assert part(clean, "right", "recomputed", "aborted") == FINE | {"right": 300, "recomputed": 0, "aborted": 0}


@pytest.mark.takes_turns("the device's cache above, and canary-vllm's loads from host memory")
@pytest.mark.where(pytest.mark.beyond_ci("the Python core"), core="rust")
@pytest.mark.where(pytest.mark.older_release, core="python", loop="overlap host")
@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("loop", ["host", "overlap host"])
def test_no_wrong_answer_from_host_memory_that_changed(launch, loop, core):
    """Bits flip in HiCache's host memory, before the next request is loaded from there; later in its slots on the
    device, too. Each answer is right: what came wrong is given up in both places, and computed again. Clean requests
    are loaded, and not computed again. Older releases have a `HiRadixCache` there."""
    settings = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": core, "CANARY_ON_VIOLATION": "protect", **QUIET}
    engine = launch({"options": OPTIONS[loop]}, **settings)
    for where in ("host", "device"):
        served = engine.serve_parked(count=20, where=where)
        flipped = served["flipped"]
        assert flipped > 3
        assert part(served, "right", "recomputed", "retracted", "quarantined") == FINE | {
            "right": 20, "recomputed": flipped, "retracted": flipped, "quarantined": flipped,
        }  # fmt: skip
    loaded = engine.arrivals()["loaded_slots"]
    clean = engine.serve_parked(count=30, seed=1, flips=False)
    assert part(clean, "right", "recomputed", "aborted", "retracted") == FINE | {
        "right": 30, "recomputed": 0, "aborted": 0, "retracted": 0,
    }  # fmt: skip
    assert engine.arrivals()["loaded_slots"] > loaded


@pytest.mark.beyond_ci("host memory that changed, and what test_storage finds in files")
def test_no_wrong_answer_from_files_that_changed(launch, tmp_path):
    """Bits flip in every file of HiCache's storage back end before each request, where nobody else stores. What comes
    wrong is a miss: it is computed again, once, and not asked for again. Clean requests are compared and left alone."""
    store = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path)}
    fields = {"options": OPTIONS["overlap files"], "environment": {**TRITON, "CANARY_BACKEND": "torch", **store}}
    engine = launch(fields, CANARY_ON_VIOLATION="protect", **QUIET, **PRIVATE)
    clean = engine.serve_parked(count=20, flips=False)
    assert part(clean, "right", "recomputed", "aborted") == FINE | {"right": 20, "recomputed": 0, "aborted": 0}
    assert clean["ledger_matched"] > 50
    served = engine.serve_parked(count=20, where="files")
    again = served["recomputed"]
    assert again > 1
    assert part(served, "right", "error", "retracted", "quarantined") == FINE | {
        "right": 20, "error": 0, "retracted": again, "quarantined": again,
    }  # fmt: skip


@pytest.mark.beyond_ci("an event for other engines whose tokens can't be withheld")
def test_files_that_others_store_are_not_relied_upon(launch, tmp_path):
    """Without ``CANARY_LEDGER_PRIVATE`` a difference proves nothing: there protect does what quarantine does."""
    store = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path)}
    fields = {"options": OPTIONS["files"], "environment": {**TRITON, "CANARY_BACKEND": "torch", **store}}
    engine = launch(fields, CANARY_ON_VIOLATION="protect", **QUIET)
    engine.serve(prompts=[list(range(3, 40))], new_tokens=2)
    told = [event["reason"] for event in engine.events() if event["name"] == "quarantine_failed"]
    assert [why for why in told if "storage back end may come back" in why]
    assert [why for why in told if why.endswith("what quarantine does here")]


@pytest.mark.beyond_ci("one pool, and single nodes of a window's cache that go")
def test_no_wrong_answer_with_sliding_windows(launch):
    """Bits flip in the full pool and in the window's. With Triton's kernels, since `torch_native` reads a window's pool
    by the numbers of the full one's slots."""
    fields = {"options": OPTIONS["overlap window"], "environment": {**TRITON, "CANARY_BACKEND": "torch"}}
    engine = launch(fields, CANARY_ON_VIOLATION="protect", **QUIET)
    served = engine.serve_parked(count=8)
    assert part(served, "right", "recomputed", "flipped") == dict.fromkeys(("right", "recomputed", "flipped"), 8) | FINE


PRESSURE = {"max_total_tokens": 160, "chunked_prefill_size": 32, "schedule_conservativeness": 0.1}
MIXED = {"enable_mixed_chunk": True, "chunked_prefill_size": 16}


@pytest.mark.where(pytest.mark.beyond_ci("the overlap scheduler under pressure"), case=["mixed", "logprobs", "roomy"])
@pytest.mark.where(pytest.mark.beyond_ci("the overlap scheduler under pressure"), loop="plain")
@pytest.mark.parametrize("case", ["pressure", "mixed", "logprobs", "roomy"])
@LOOPS
def test_bits_that_flip_anywhere_give_no_wrong_answer(launch, loop, case):
    """Every read is compared, and bits flip in slots of running requests and in parked ones, while requests are split
    into chunks and retracted by SGLang itself. Each ends with the right answer or with an error; no slot is lost."""
    more = {"pressure": PRESSURE, "mixed": MIXED}.get(case, {})
    engine = launch({"options": {**OPTIONS[loop], **more}}, CANARY_ON_VIOLATION="protect", **COMPARED)
    asked = {"return_logprob": True, "logprob_start_len": 0} if case == "logprobs" else {}
    served = engine.storm_of_flips(seed=3, count=30, rate=0.15, **asked)
    assert part(served, "wrong", "wrong_logprobs", "lost", "emptied") == FINE | {
        "wrong": 0, "wrong_logprobs": 0, "lost": 0, "emptied": True,
    }  # fmt: skip
    assert served["right"] > 9
    assert served["right"] + served["error"] == 30
    assert served["recomputed"] + served["aborted"] > 0


@pytest.mark.takes_turns("the same flips, where the verdict comes later")
@pytest.mark.parametrize("case", ["parked", "storm"])
def test_no_wrong_answer_where_the_verdict_comes_with_the_tokens(launch, case):
    """As on a GPU, in whose place a CPU stands here: the overlap scheduler has issued the next batch by then, with the
    same requests. Their rows are passed by, their slots come back, and the answers are right."""
    storm = case == "storm"
    settings = COMPARED if storm else QUIET
    options = {**OPTIONS["overlap"], **(PRESSURE if storm else {})}
    engine = launch({"options": options}, CANARY_ON_VIOLATION="protect", **settings)
    engine.know_findings_with_tokens()
    if not storm:
        served = engine.serve_parked(count=10)
        assert part(served, "right", "recomputed", "flipped") == FINE | {"right": 10, "recomputed": 10, "flipped": 10}
        return
    served = engine.storm_of_flips(seed=3, count=30, rate=0.15)
    assert part(served, "wrong", "lost", "emptied") == FINE | {"wrong": 0, "lost": 0, "emptied": True}
    assert served["right"] > 9
    assert served["right"] + served["error"] == 30
    assert served["recomputed"] + served["aborted"] > 0


@pytest.mark.takes_turns("canary-vllm's test of the same name")
def test_a_running_request_ends_with_an_error_where_its_tokens_may_be_wrong(start):
    """The scrub finds the slot some steps after it changed: nobody knows which tokens were computed from it. The
    request ends with status 503 and no token more; the one beside it goes on, and nothing corrupted stays cached."""
    engine = start("mha", CANARY_ON_VIOLATION="protect", CANARY_READ_CHECK="0")
    prompts = [engine.setup.traffic(0)[0], engine.setup.traffic(1)[0]]
    clean = engine.serve(prompts=prompts, new_tokens=30, together=2)["outputs"]
    engine.flush()
    done = engine.rot_running(prompts=prompts, region="full", source="k.2")
    good, bad = done["reasons"]
    assert (good["type"], bad["type"], bad["status_code"]) == ("length", "abort", 503)
    assert done["outputs"][0] == clean[0]
    assert len(done["outputs"][1]) < 30
    (told,) = [event for event in engine.events() if event["name"] in ("aborted", "recomputed")]
    assert (told["name"], told["request"], told["slot"]) == ("aborted", done["requests"][1], done["slot"])
    assert engine.serve(prompts=prompts, new_tokens=30, together=2)["outputs"] == clean


@pytest.mark.takes_turns("canary-vllm's test of the same name")
@LOOPS
def test_no_wrong_answer_from_kv_that_changes_within_a_forward(launch, loop):
    """All reads are compared, and a slot changes after that, before attention reads it: the token of this forward is
    wrong, and the forward after it finds the slot. By default most answers are wrong; with protect each request ends
    with an error."""
    engine = launch({"options": OPTIONS[loop]}, CANARY_ON_VIOLATION="protect", **COMPARED)
    served = engine.serve_changed_within(count=6)
    assert part(served, "wrong", "error", "aborted") == FINE | {"wrong": 0, "error": 6, "aborted": 6}
    plain = launch({"options": OPTIONS[loop]}, **COMPARED).serve_changed_within(count=6)
    assert plain["wrong"] > 3


@pytest.mark.beyond_ci("the storm, where some requests are broken again and again")
def test_what_is_always_wrong_ends_with_an_error(launch):
    """A bit flips whenever the request has slots: it is computed again twice, then ends."""
    options = OPTIONS["overlap"] | {"chunked_prefill_size": 8}
    engine = launch({"options": options}, CANARY_ON_VIOLATION="protect", **COMPARED)
    served = engine.storm_of_flips(seed=1, count=1, rate=1.0, at_least=8)
    assert part(served, "error", "recomputed", "aborted", "lost") == FINE | {
        "error": 1, "recomputed": 2, "aborted": 1, "lost": 0,
    }  # fmt: skip


@pytest.mark.beyond_ci("SGLang's default cache")
@pytest.mark.parametrize("core", ["python", "rust"])
def test_no_wrong_answer_with_each_core_of_the_prefix_cache(launch, core):
    """As above; each gives up only what is below the slot."""
    settings = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": core, "CANARY_ON_VIOLATION": "protect", **QUIET}
    engine = launch({"options": OPTIONS["overlap"]}, **settings)
    served = engine.serve_parked(count=30)
    assert part(served, "right", "recomputed") == FINE | {"right": 30, "recomputed": served["flipped"]}


@pytest.mark.beyond_ci("an event for hits that are not compared, without bytes")
@pytest.mark.parametrize(
    ("name", "reason"), [("hicache", "KV comes back from host memory"), ("deepseek_v4", "withholding was not shown")]
)
def test_an_engine_whose_tokens_cannot_be_withheld_is_told_at_the_start(start, name, reason):
    """There protect does what quarantine does, and says so. Hits are compared all the same."""
    engine = start(name, CANARY_ON_VIOLATION="protect", CANARY_TRANSFER_RECORDS="false")
    engine.serve(prompts=engine.setup.traffic(0)[:2], new_tokens=4)
    told = [event["reason"] for event in engine.events() if event["name"] == "quarantine_failed"]
    assert [why for why in told if why.startswith(reason) and why.endswith("what quarantine does here")]
    assert "hits_unchecked" not in {event["name"] for event in engine.events()}


@pytest.mark.takes_turns("canary-vllm's hits that can't be compared")
def test_hits_are_not_compared_without_bytes(start):
    """``CANARY_BYTES=off``: there is nothing to compare with, and an event says so."""
    engine = start("mha", CANARY_ON_VIOLATION="protect", CANARY_BYTES="off", CANARY_READ_CHECK="0")
    (told,) = [event["reason"] for event in engine.events() if event["name"] == "hits_unchecked"]
    assert "CANARY_BYTES=off" in told
