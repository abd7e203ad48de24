"""``CANARY_ON_VIOLATION=protect`` beside speculative decoding, where a step may give out several tokens: on real SGLang
with its own workers of drafts and event loops; Triton's kernels are interpreted. Bits flip from outside, in SGLang's
own tensors of the served model."""

import pytest
from engines.setups import HICACHE, SPECULATIVE, speculative

pytestmark = pytest.mark.timeout(900)
QUIET = {"CANARY_ON_VIOLATION": "protect", "CANARY_INCIDENT_LIMIT": "1", "CANARY_SCRUB_BUDGET": "0"}
COVERED_BY = "EAGLE's chains with the overlap scheduler, under pressure and where the verdict comes with the tokens"
FINE = {"wrong": 0, "quarantine_failed": 0, "disabled": 0, "reporting_failed": 0}
TREE = {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 5}
OVERLAP = {"disable_overlap_schedule": False}
PRESSURE = {"max_total_tokens": 160, "chunked_prefill_size": 32, "schedule_conservativeness": 0.1}
WAYS = {
    "eagle": SPECULATIVE["eagle"],
    "eagle_tree": SPECULATIVE["eagle_tree"],
    "eagle_pages": SPECULATIVE["eagle_pages"],
    "standalone": SPECULATIVE["standalone"],
    "ngram": SPECULATIVE["ngram"],
    "overlap": speculative(OVERLAP),
    "tree_overlap": speculative(TREE | OVERLAP),
    "pressure": speculative(PRESSURE),
    "pressure_overlap": speculative(PRESSURE | OVERLAP),
}


def served_by(launch, way, **settings):
    """An engine of ``WAYS``."""
    setup = WAYS[way]
    return launch({"options": setup.options, "environment": setup.environment}, **QUIET, **settings)


@pytest.mark.where(pytest.mark.takes_turns("the storm, where requests are computed again, too"), way=["overlap"])
@pytest.mark.where(
    pytest.mark.beyond_ci(COVERED_BY), way=["eagle", "eagle_tree", "tree_overlap", "eagle_pages", "ngram"]
)
@pytest.mark.where(pytest.mark.beyond_ci(COVERED_BY), way="standalone")
@pytest.mark.parametrize(
    ("way", "late"),
    [
        *(("eagle", False), ("overlap", False), ("overlap", True), ("eagle_tree", False), ("tree_overlap", False)),
        *(("eagle_pages", False), ("standalone", False), ("ngram", False)),
    ],
)
def test_no_wrong_answer_from_parked_kv_that_changed(launch, way, late):
    """Each request hits a slot in which a bit has flipped, and is computed again. ``late``: as on a GPU, a batch under
    way with the request has sampled once more by then."""
    engine = served_by(launch, way, CANARY_READ_CHECK="0")
    if late:
        engine.know_findings_with_tokens()
    served = engine.serve_parked(count=8)
    assert {name: served[name] for name in (*FINE, "right", "recomputed", "retracted", "flipped")} == FINE | {
        "right": 8, "recomputed": 8, "retracted": 8, "flipped": 8,
    }  # fmt: skip
    clean = engine.serve_parked(count=10, seed=1, flips=False, together=3)
    assert {name: clean[name] for name in (*FINE, "right", "recomputed", "retracted")} == FINE | {
        "right": 10, "recomputed": 0, "retracted": 0,
    }  # fmt: skip


@pytest.mark.takes_turns("the storm without speculation")
@pytest.mark.where(pytest.mark.beyond_ci(COVERED_BY), late=[False])
@pytest.mark.where(pytest.mark.beyond_ci(COVERED_BY), way=["eagle", "overlap", "eagle_tree", "tree_overlap", "ngram"])
@pytest.mark.where(pytest.mark.beyond_ci(COVERED_BY), way=["standalone", "pressure"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "way", ["eagle", "overlap", "eagle_tree", "tree_overlap", "standalone", "ngram", "pressure", "pressure_overlap"]
)
def test_bits_that_flip_anywhere_give_no_wrong_answer(launch, way, late):
    """Every read is compared, and bits flip in slots of running requests and in parked ones. Each request ends with the
    right answer or with an error, and no slot is lost. ``late``: as on a GPU, in whose place a CPU stands here, the
    verdict comes with the tokens, when the overlap scheduler has issued the next batch."""
    engine = served_by(launch, way, CANARY_READ_CHECK="-1")
    if late:
        engine.know_findings_with_tokens()
    served = engine.storm_of_flips(seed=3, count=14, rate=0.15)
    assert {name: served[name] for name in (*FINE, "lost", "emptied")} == FINE | {"lost": 0, "emptied": True}
    assert served["right"] + served["error"] == 14
    assert served["right"] > 4
    assert served["recomputed"] + served["aborted"] > 0


@pytest.mark.beyond_ci("an event for other engines whose tokens can't be withheld, in test_protection")
def test_beside_host_memory_nothing_is_withheld_and_an_event_says_so(launch):
    """There nobody has tried it."""
    setup = WAYS["eagle"]
    fields = {"options": setup.options | HICACHE, "environment": setup.environment}
    engine = launch(fields, **QUIET, CANARY_READ_CHECK="0")
    engine.serve(prompts=[list(range(3, 40))], new_tokens=2)
    told = [event["reason"] for event in engine.events() if event["name"] == "quarantine_failed"]
    assert [why for why in told if "beside HiCache" in why and why.endswith("what quarantine does here")]
