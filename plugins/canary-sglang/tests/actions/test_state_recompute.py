"""Models with recurrent states beside attention, computed again by SGLang's scheduler: clean requests are never told,
and one with wrong states is, by the states themselves, or by the KV of the layers behind."""

import re

import pytest
from tools.recompute_verdicts import ALL, clean, states_compared, told
from tools.recomputes import QUIET, prompt

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.xdist_group("hybrids"),
    pytest.mark.takes_turns("models without states, and canary-vllm's with states", unit="hybrids"),
]

ROOM = {"max_total_tokens": 1536, "max_running_requests": 6, "max_mamba_cache_size": 32}
"""For internal requests beside three others."""
EXACT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
"""States of convolutions as exact as all else; by default they are rounded to bfloat16."""
CHECKPOINTS = {"mamba_radix_cache_strategy": "extra_buffer", "mamba_track_interval": 64, "chunked_prefill_size": 128}
BESIDE = pytest.mark.beyond_ci("Mamba-2, whose requests are computed again in the same way")


def started(launch, model, options=None, **settings):
    """An engine with room for internal requests, in 32-bit floats unless its kernels take shorter ones only."""
    environment = {} if model == "gated_delta" else EXACT
    return launch({"options": {**ROOM, **(options or {})}, "environment": environment}, model, **settings)


def traffic(count, longest=90):
    """Fresh prompts of up to three chunks, and each of them prolonged soon after, which hits it with its states."""
    prompts = [prompt(i, (35, longest, 50)[i % 3]) for i in range(count)]
    longer = [[*one, *prompt(f"more {i}", 8 + i % 7)] for i, one in enumerate(prompts)]
    return [one for i in range(0, count, 3) for one in (*prompts[i : i + 3], *longer[i : i + 3])]


@pytest.fixture(scope="module")
def engine(launch):
    """Mamba-2, which learns its noise once."""
    made = started(launch, "mamba2", **QUIET, CANARY_CONTROL="write")
    made.parked_teach(tokens=90)
    return made


@pytest.mark.parametrize(
    ("model", "count", "longest"),
    [
        ("mamba2", 6, 90),
        pytest.param("short_conv", 12, 150, marks=BESIDE),
        pytest.param("gated_delta", 6, 90, marks=BESIDE),
        pytest.param("kimi_delta", 12, 90, marks=BESIDE),
    ],
)
def test_clean_traffic_is_well_and_answers_stay_the_same(launch, model, count, longest):
    """Hits, which go on from a copy of the states, and chunks, with as many internal requests as there is room for:
    none differs, no state stays behind, and answers are those without Canary."""
    prompts = traffic(count, longest)
    done = started(launch, model, **ALL).recompute_traffic(prompts=prompts, new_tokens=40)
    judged, _ = clean(done, 0)
    assert judged >= count
    assert states_compared(done).count(True) >= count
    assert done["cached"] > 100
    plain = started(launch, model, CANARY_MODE="off")
    assert done["outputs"] == plain.serve(prompts=prompts, new_tokens=40)["outputs"]


@pytest.mark.beyond_ci("the overlap scheduler with models without states")
def test_the_overlap_scheduler_with_checkpoints_is_well(launch):
    """Hits go on from checkpoints that forwards have put aside, and a batch is made before the result of the one before
    is known; both computations end at the same token all the same."""
    options = {**CHECKPOINTS, "disable_overlap_schedule": False}
    prompts = traffic(6, 140)
    done = started(launch, "gated_delta", options, **ALL).recompute_overlapped(prompts=prompts, new_tokens=40)
    judged, _ = clean(done, 0)
    assert judged >= 6
    assert states_compared(done).count(True) >= 6
    assert done["cached"] >= 64


@pytest.mark.beyond_ci("states that are not compared, without an engine")
def test_states_of_a_request_that_decodes_meanwhile_are_left_out(launch):
    """Where chunks and decodes share a batch its states are those of a later token, and the answer says so."""
    engine = started(launch, "short_conv", {"enable_mixed_chunk": True}, **ALL)
    done = engine.recompute_traffic(prompts=traffic(6, 150), new_tokens=40)
    clean(done, 0)
    left_out = [answer["uncompared"] for answer in done["answers"]]
    assert ["mamba conv.0", "mamba conv.2", "mamba conv.3"] in left_out
    assert [not one for one in left_out] == states_compared(done)
    assert done["stats"]["recompute_left_out"] == states_compared(done).count(False)


@pytest.mark.beyond_ci("the same with models without states, and clean traffic with states")
@pytest.mark.parametrize(("how", "options"), [("abort", {"enable_mixed_chunk": True}), ("crowd", {})])
def test_an_internal_request_gives_its_states_back_between_two_chunks(launch, how, options):
    """Its request is aborted by the client, or others come."""
    engine = started(launch, "short_conv", options, **QUIET, CANARY_CONTROL="write")
    done = engine.recompute_aborted(tokens=150, how=how)
    assert not done["in_the_middle"]
    assert done["on"]
    assert not done["leaked"]
    assert ("ended" if how == "abort" else "noise") in done["answer"]["reason"]


@pytest.mark.beyond_ci("a prefix cache, and room for the states of many requests")
@pytest.mark.parametrize("options", [{"max_mamba_cache_size": 15}, {"disable_radix_cache": True}])
def test_states_are_taken_where_there_is_room_for_them(launch, options):
    """Where requests of users leave the prefix cache none to keep, and without a prefix cache."""
    done = started(launch, "short_conv", options, **ALL).recompute_traffic(prompts=traffic(6), new_tokens=40)
    judged, _ = clean(done, 0)
    assert judged >= 6
    assert states_compared(done).count(True) >= 6


@pytest.mark.parametrize(
    ("fault", "position"),
    [("another_state", 50), ("lost_updates", 51), ("exchanged_states", None)],
)
def test_wrong_states_are_told_and_the_request_beside_is_well(engine, fault, position):
    """By the KV and the states alone: all checks of bytes are off. The state of the first layer is named, and where the
    KV of the layer behind begins to differ; no token has read yet what was exchanged since the last forward."""
    done = engine.recompute_broken(fault=fault, tokens=50)
    assert done["verdicts"] == ["differs", "same"], done["answers"]
    # A second finding of the same state and request is the first one once more.
    found = done["answers"][0]["finding"]
    assert found.startswith("a recurrent state of ill is not what the model computes from its tokens, in layer 0")
    behind = re.search(r"behind it [kv]\.1 differs from position (\d+) on", found)
    assert (int(behind[1]) if behind else None) == position


def test_states_behind_what_ended_requests_left_are_compared(engine):
    """The cache keeps them with the last token: as they are they are the same, and scaled they differ."""
    engine.parked_serve(lengths={"old": 60, "older": 50}, new_tokens=12)
    done = engine.parked_verify(names=["old", "older"])
    assert [(one["verdict"], one["tokens"]) for one in done["answers"]] == [("same", 71), ("same", 61)]
    assert states_compared(done) == [True, True]
    assert done["violations"] == []
    engine.parked_state(name="old", factor=1.1)
    done = engine.parked_verify(names=["old", "older"])
    assert [one["verdict"] for one in done["answers"]] == ["differs", "same"]
    assert told(done) == [(0, None, "old", "state")]


@pytest.mark.beyond_ci("prefixes whose last states are those behind their last token")
def test_what_ended_requests_left_reaches_to_their_last_checkpoint(launch):
    """With checkpoints the cache takes no KV behind the last of them."""
    engine = started(launch, "gated_delta", CHECKPOINTS, **QUIET, CANARY_CONTROL="write")
    engine.parked_serve(lengths={"old": 150, "older": 60}, new_tokens=12)
    done = engine.parked_verify()
    assert [(one["request"], one["tokens"]) for one in done["answers"]] == [("old", 128), ("older", 64)]
    assert {one["verdict"] for one in done["answers"]} <= {"same", "unjudged"}
    assert states_compared(done) == [True, True]
    assert done["violations"] == []
