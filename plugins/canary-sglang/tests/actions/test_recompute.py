"""Requests that SGLang's scheduler computes again: clean ones are never told, broken ones are, by their KV alone."""

import pytest
from tools.recompute_verdicts import ALL, clean, told
from tools.recomputes import ASKED, OPTIONS, QUIET, prompt

from canary_adapters.recompute_requests import TEACHING

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("recompute")]

OVERLAP = {"disable_overlap_schedule": False}


def traffic():
    """Lengths up to three chunks, and many hits."""
    shared = prompt("shared", 60)
    lengths = [35, 90, 50, 150, 40, 70]
    return [
        [*(shared[: 20 + 5 * (i % 8)] if i % 3 == 0 else []), *prompt(i, lengths[i % len(lengths)])] for i in range(64)
    ]


@pytest.fixture(scope="module")
def plain(launch):
    """The same engine without Canary."""
    return launch({"options": OPTIONS}, CANARY_MODE="off")


@pytest.mark.newest_release
def test_clean_traffic_is_well_and_answers_stay_the_same(plain, launch):
    """Hits and chunks: with as many internal requests as there is room for."""
    watched = launch({"options": OPTIONS}, **ALL)
    done = watched.recompute_traffic(prompts=traffic(), new_tokens=60)
    judged, same = clean(done)
    assert judged >= 60
    assert same >= 40
    assert done["cached"] > 200
    assert done["outputs"] == plain.serve(prompts=traffic(), new_tokens=60)["outputs"]


@pytest.mark.beyond_ci("canary-vllm's test of the same name")
def test_so_many_are_computed_again_and_no_more(launch):
    """A number, in the place of a share: beyond those that teach the noise."""
    watched = launch({"options": OPTIONS}, **{**ALL, "CANARY_RECOMPUTE": "3"})
    judged, _ = clean(watched.recompute_traffic(prompts=traffic(), new_tokens=60))
    assert judged == TEACHING + 3


@pytest.mark.takes_turns("clean traffic here, and prefixes with the overlap scheduler in test_parked")
def test_the_overlap_scheduler_is_well(plain, launch):
    """SGLang's own event loop, which makes a batch before it knows the result of the one before."""
    watched = launch({"options": {**OPTIONS, **OVERLAP}}, **ALL)
    done = watched.recompute_overlapped(prompts=traffic()[:36], new_tokens=60)
    judged, same = clean(done)
    assert judged >= 30
    assert same >= 12
    assert done["outputs"] == plain.serve(prompts=traffic()[:36], new_tokens=60)["outputs"]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        pytest.param("changed_norm", (1, 0, "ill", "brought"), marks=pytest.mark.takes_turns("other faults")),
        ("short_decodes", (1, 50, "ill", "attention")),
        ("skipped_layer", (1, 0, "ill", "everywhere")),
        ("shifted_positions", (0, 50, "ill", "half")),
    ],
)
def test_broken_engines_are_told_and_the_request_beside_is_well(launch, fault, expected):
    """By the KV alone: all checks of bytes are off."""
    engine = launch({"options": OPTIONS}, **ASKED)
    done = engine.recompute_broken(fault=fault, tokens=50)
    assert done["verdicts"] == ["differs", "same"], done["answers"]
    assert told(done) == [expected]


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.takes_turns("the same in float32"))]
)
def test_noise_of_a_decode_kernel_is_told_by_one_recompute(launch, dtype):
    """5 % in one of four heads of one layer: in the layer behind, from the first decode on; in bfloat16 a few tokens
    later, since the noise of a single token may be less than a rounding. Before nothing is told, nor after."""
    engine = launch({"options": {**OPTIONS, "dtype": dtype}}, **ASKED)
    done = engine.recompute_broken(fault="noisy_head", tokens=50)
    assert done["before"] == []
    assert done["verdicts"] == ["differs", "same"], done["answers"]
    ((layer, position, request, rule),) = told(done)
    assert (layer, request, rule) == (1, "ill", "attention")
    assert 50 <= position <= (50 if dtype == "float32" else 54)
    after = engine.attention_verified(tokens=50)
    assert {one["verdict"] for one in after["answers"]} == {"same"}
    assert after["violations"] == []


def test_bytes_that_changed_are_in_the_answer(launch):
    """One bit of one token, of which the numbers say nothing: the answer is no ``same``, and the finding is told."""
    engine = launch({"options": OPTIONS}, **{**ASKED, "CANARY_BYTES": "all"})
    done = engine.recompute_broken(fault="flipped_bit", tokens=50)
    assert done["verdicts"] == ["differs", "same"], done["answers"]
    ill, well = (answer["bytes"] for answer in done["answers"])
    assert (ill["changed"], ill["source"], ill["position"]) == (1, "v.1", done["at"])
    assert (well["changed"], well["share"]) == (0, 1.0)
    assert [found["kind"] for found in done["violations"]] == ["bytes"]


COARSE = {**OPTIONS, "kv_cache_dtype": "fp8_e4m3"}
"""KV stored in fp8."""


@pytest.mark.takes_turns("the same in float32, and canary-vllm's KV in fp8")
def test_clean_traffic_is_well_in_fp8_too(launch):
    """In bfloat16, where another batch rounds otherwise, and a few numbers fall to another step of fp8."""
    done = launch({"options": {**COARSE, "dtype": "bfloat16"}}, **ALL).recompute_traffic(
        prompts=traffic()[:40], new_tokens=60
    )
    verdicts = [answer["verdict"] for answer in done["answers"]]
    assert done["violations"] == []
    assert "differs" not in verdicts
    assert verdicts.count("same") >= 20


@pytest.mark.takes_turns("the same in float32, and canary-vllm's KV in fp8")
@pytest.mark.parametrize(
    ("fault", "layer", "rule"),
    [
        ("changed_norm", 1, "brought"),
        ("short_decodes", 1, "attention"),
        ("skipped_layer", 1, "everywhere"),
        ("changed_scale", 1, "brought"),
    ],
)
def test_broken_engines_are_told_in_fp8_too(launch, fault, layer, rule):
    """By the KV alone, up to a few tokens in which no number fell to another step."""
    done = launch({"options": COARSE}, **ASKED).recompute_broken(fault=fault, tokens=50)
    assert done["verdicts"] == ["differs", "same"], done["answers"]
    ((found, position, request, why),) = told(done)
    assert (found, request, why) == (layer, "ill", rule)
    begun = 50 if fault == "short_decodes" else 0
    assert begun <= position < begun + 8


@pytest.mark.takes_turns("K and V apart, in float32 and in fp8")
@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
def test_compressed_kv_is_judged_in_either_type(launch, dtype):
    """MLA: prefills attend to what they have just computed, and decodes to what is stored, so in fp8 clean requests are
    a rounding of the type apart."""
    room = {key: OPTIONS[key] for key in ("max_total_tokens", "max_running_requests")}
    engine = launch({"options": {**room, "kv_cache_dtype": dtype}}, "mla", **QUIET, CANARY_RECOMPUTE="100%")
    done = engine.recompute_traffic(prompts=[one[:70] for one in traffic()[:24]], new_tokens=40)
    judged, same = clean(done, layers=2 if dtype == "auto" else 0)
    assert judged >= 20
    assert same >= 3
    done = engine.recompute_broken(fault="skipped_layer", tokens=40)
    assert done["verdicts"] == ["differs", "same"], done["answers"]
    assert set(told(done)) == {(1, 0, "ill", "everywhere")}


@pytest.mark.takes_turns("prefixes that give way in test_parked, and canary-vllm's tests of the same name")
@pytest.mark.parametrize(("how", "options"), [("abort", {"enable_mixed_chunk": True}), ("crowd", {})])
def test_an_internal_request_gives_way_in_the_middle(launch, how, options):
    """Its request is aborted by the client, or others come: it ends between two chunks."""
    engine = launch({"options": {**OPTIONS, **options}}, **ASKED)
    done = engine.recompute_aborted(tokens=150, how=how)
    assert not done["in_the_middle"]
    assert done["on"]
    assert not done["leaked"]
    assert not [name for name in done["names"] if name.startswith("canary")]
    reason = done["answer"]["reason"]
    assert ("ended" if how == "abort" else "noise") in reason
    assert done["outputs"] == ({"crowd": 4} if how == "crowd" else {})


@pytest.mark.takes_turns("canary-vllm's test of the same name")
def test_the_end_of_canary_ends_an_internal_request(launch):
    """Whoever asked hears of it, and the engine goes on."""
    done = launch({"options": OPTIONS}, **ASKED).recompute_aborted(tokens=150, how="close")
    assert "switched off" in done["answer"]["error"]
    assert not done["in_the_middle"]
    assert not done["closed"]
    assert not done["leaked"]
    assert not [name for name in done["names"] if name.startswith("canary")]
