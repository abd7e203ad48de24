"""``CANARY_ON_VIOLATION=protect`` with two ranks, each a process of SGLang's own: bits flip in one rank's tensors, from
outside. Tensor-parallel ranks, and the stages of a pipeline, withhold the same tokens of the same requests; a rank of
data-parallel attention withholds those of its own requests."""

import pytest
from engines.ranks import phase, run, told
from tools.rank_flips import serve_flipped

pytestmark = [pytest.mark.timeout(900), pytest.mark.first]
GUARD = {"CANARY_PLUGINS": "sglang,ranks_witness", "CANARY_ON_VIOLATION": "protect", "CANARY_SCRUB_BUDGET": "0"}
HITS = GUARD | {"CANARY_READ_CHECK": "0"}
BOTH = [0, 0]
BESIDE = pytest.mark.takes_turns("one process with protect, and two ranks with quarantine in test_ranks")
FINE = {"wrong": 0, "alike": True, "quarantine_failed": BOTH, "disabled": BOTH, "reporting_failed": BOTH}


def counted(served):
    """Without the answers themselves."""
    return {name: value for name, value in served.items() if name not in ("clean", "kinds")}


@BESIDE
@pytest.mark.where(pytest.mark.beyond_ci("the same with the overlap scheduler"), loop="plain")
@pytest.mark.parametrize("loop", ["plain", "overlap"])
def test_no_wrong_answer_from_what_changed_in_one_ranks_cache(tmp_path, loop):
    """Only rank 1 can know; both compute each request again in the same step, and give up the same nodes."""
    served = serve_flipped(tmp_path / "flipped", 12, overlap=loop == "overlap", **HITS)
    assert counted(served) == FINE | {
        "asked": 12, "flipped": [0, 12], "right": 12, "error": 0, "recomputed": [12, 12], "aborted": BOTH,
        "quarantined": [12, 12],
    }  # fmt: skip


@pytest.mark.beyond_ci("one rank's prefix cache, and states of a single rank")
def test_no_wrong_answer_from_one_ranks_states(tmp_path):
    """A model with recurrent states, in which bits flip, too: rank 1's part of a state says what both give up."""
    served = serve_flipped(tmp_path / "flipped", 8, "parked", "states", overlap=False, **HITS)
    assert counted(served) == FINE | {
        "asked": 8, "flipped": [0, 8], "right": 8, "error": 0, "recomputed": [8, 8], "aborted": BOTH,
        "quarantined": [8, 8],
    }  # fmt: skip


@pytest.mark.beyond_ci("one rank's prefix cache, and host memory of a single rank")
def test_no_wrong_answer_from_what_changed_in_one_ranks_host_memory(tmp_path):
    """HiCache: what rank 1 is loaded wrong is a miss on both, which give up the same nodes."""
    served = serve_flipped(tmp_path / "flipped", 20, "host", "host", **HITS)
    _, flipped = served["flipped"]
    assert flipped > 2
    assert counted(served) == FINE | {
        "asked": 20, "flipped": [0, flipped], "right": 20, "error": 0, "recomputed": [flipped, flipped],
        "aborted": BOTH, "quarantined": [flipped, flipped],
    }  # fmt: skip


@BESIDE
def test_stages_of_a_pipeline_act_alike(tmp_path):
    """Only the stage with the layer can know; both compute each request again, and give up the same nodes, in the same
    turn of their loops, which are never at the same turn at once."""
    served = serve_flipped(tmp_path / "flipped", 12, "either", "pp", **HITS)
    assert min(served["flipped"]) > 2
    assert counted(served) == FINE | {
        "asked": 12, "flipped": served["flipped"], "right": 12, "error": 0, "recomputed": [12, 12], "aborted": BOTH,
        "quarantined": [12, 12],
    }  # fmt: skip


@BESIDE
def test_each_rank_of_data_parallel_attention_acts_for_itself(tmp_path):
    """Bits flip in one rank's cache or in the other's; the one computes its request again, while the other goes on with
    its own."""
    served = serve_flipped(tmp_path / "flipped", 12, "either", "dp", **HITS)
    flipped = served["flipped"]
    assert min(flipped) > 1
    assert counted(served) == FINE | {
        "asked": 12, "flipped": flipped, "right": 12, "error": 0, "recomputed": flipped, "aborted": BOTH,
        "quarantined": flipped,
    }  # fmt: skip


@pytest.mark.beyond_ci("one rank's running requests, and the agreement of two with parked KV")
@pytest.mark.parametrize("kind", ["tp", "pp"])
def test_running_requests_of_one_rank_are_right_or_end_alike(tmp_path, kind):
    """Every read is compared, and bits flip in what four requests are decoded from, in a pipeline in two batches that
    are on their way at once."""
    served = serve_flipped(tmp_path / "flipped", 24, "decoding", kind, **GUARD, CANARY_READ_CHECK="-1")
    assert {name: served[name] for name in FINE} == FINE
    assert served["right"] + served["error"] == 24
    assert min(served["aborted"]) > 0
    for name in ("recomputed", "aborted", "quarantined"):
        assert served[name][0] == served[name][1]


@pytest.mark.beyond_ci("that nothing is computed again, by the answers of test_ranks")
@pytest.mark.parametrize("kind", ["tp", "dp", "pp"])
def test_clean_requests_are_left_alone(tmp_path, kind):
    """Nothing is ended, withheld or given up, and answers are those of an engine without Canary."""
    plain = serve_flipped(tmp_path / "plain", 2, "nothing", kind)
    served = serve_flipped(tmp_path / "clean", 60, "nothing", kind, **HITS)
    assert served["clean"] == plain["clean"]
    assert counted(served) == FINE | {
        "asked": 60, "flipped": BOTH, "right": 60, "error": 0, "recomputed": BOTH, "aborted": BOTH, "quarantined": BOTH,
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
