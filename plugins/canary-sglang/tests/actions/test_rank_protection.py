"""``CANARY_ON_VIOLATION=protect`` with two tensor-parallel ranks, each a process of SGLang's own: bits flip in one
rank's tensors, from outside, and both withhold the same tokens of the same requests."""

import pytest
from engines.ranks import phase, run, told
from tools.rank_flips import serve_flipped

pytestmark = [pytest.mark.timeout(900), pytest.mark.first]
GUARD = {"CANARY_PLUGINS": "sglang,ranks_witness", "CANARY_ON_VIOLATION": "protect", "CANARY_SCRUB_BUDGET": "0"}
HITS = GUARD | {"CANARY_READ_CHECK": "0"}
BOTH = [0, 0]
FINE = {"wrong": 0, "alike": True, "quarantine_failed": BOTH, "disabled": BOTH, "reporting_failed": BOTH}


@pytest.mark.where(pytest.mark.beyond_ci("the same with the overlap scheduler"), loop="plain")
@pytest.mark.parametrize("loop", ["plain", "overlap"])
def test_no_wrong_answer_from_what_changed_in_one_ranks_cache(tmp_path, loop):
    """Only rank 1 can know; both compute each request again in the same step, and give up the same nodes."""
    served = serve_flipped(tmp_path / "flipped", 12, overlap=loop == "overlap", **HITS)
    assert served == FINE | {
        "asked": 12, "flipped": 12, "right": 12, "error": 0, "recomputed": [12, 12], "aborted": BOTH,
        "quarantined": [12, 12],
    }  # fmt: skip


@pytest.mark.beyond_ci("one rank's prefix cache, and host memory of a single rank")
def test_no_wrong_answer_from_what_changed_in_one_ranks_host_memory(tmp_path):
    """HiCache: what rank 1 is loaded wrong is a miss on both, which give up the same nodes."""
    served = serve_flipped(tmp_path / "flipped", 20, "host", host=True, **HITS)
    flipped = served["flipped"]
    assert flipped > 2
    assert served == FINE | {
        "asked": 20, "flipped": flipped, "right": 20, "error": 0, "recomputed": [flipped, flipped], "aborted": BOTH,
        "quarantined": [flipped, flipped],
    }  # fmt: skip


@pytest.mark.beyond_ci("one rank's running requests, and the agreement of two with parked KV")
def test_running_requests_of_one_rank_are_right_or_end_alike(tmp_path):
    """Every read is compared, and bits flip in what four requests are decoded from."""
    served = serve_flipped(tmp_path / "flipped", 24, "decoding", **GUARD, CANARY_READ_CHECK="-1")
    assert {name: served[name] for name in FINE} == FINE
    assert served["right"] + served["error"] == 24
    assert min(served["recomputed"]) > 0
    for name in ("recomputed", "aborted", "quarantined"):
        assert served[name][0] == served[name][1]


@pytest.mark.beyond_ci("that nothing is computed again, by the answers of test_ranks")
def test_clean_requests_are_left_alone(tmp_path):
    """Nothing is ended, withheld or given up."""
    served = serve_flipped(tmp_path / "clean", 60, "nothing", **HITS)
    assert served == FINE | {
        "asked": 60, "flipped": 0, "right": 60, "error": 0, "recomputed": BOTH, "aborted": BOTH, "quarantined": BOTH,
    }  # fmt: skip


@pytest.mark.beyond_ci("SGLang's own end of an engine that has lost a rank")
def test_an_engine_that_loses_a_rank_ends(tmp_path):
    """Rank 1 is killed within a decode: rank 0 doesn't wait for its verdict, and the engine ends."""
    prompts = [list(range(3, 43)), list(range(50, 90))]
    phases = [phase("nothing", prompts, 4), phase("kill", prompts, 60)]
    folder, options = tmp_path / "killed", {"tp_size": 2, "model": "llama"}
    assert run(folder, options, phases, ["flips = tools.rank_flips:install"], **HITS) != 0
    assert folder.joinpath("log").read_text(errors="replace").count("PHASE ") == 1
    assert told(folder, 0, "forward")
