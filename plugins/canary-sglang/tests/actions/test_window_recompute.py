"""Models with windows in a pool of their own, computed again by SGLang's scheduler: full layers are compared wholly,
those with a window as far as it still holds tokens."""

import pytest
from tools.recompute_verdicts import ALL, BYTES_OFF, clean, told
from tools.recomputes import prompt

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("windows")]

OPTIONS = {
    "model": "windows", "attention_backend": "triton", "triton_attention_num_kv_splits": 1, "dtype": "float32",
    "max_total_tokens": 768,
}  # fmt: skip
ENVIRONMENT = {"TRITON_INTERPRET": "1", "SGLANG_SWA_EVICTION_INTERVAL": "1"}
"""Windows give up a token with each forward; by default every 128th."""


def test_clean_traffic_is_well_and_answers_stay_the_same(launch):
    """Hits and chunks, longer than the window."""
    shared = prompt("shared", 60)
    prompts = [[*(shared[: 30 + 5 * (i % 6)] if i % 3 == 0 else []), *prompt(i, 40 + 7 * (i % 5))] for i in range(24)]
    plain = launch({"options": OPTIONS, "environment": ENVIRONMENT}, CANARY_MODE="off")
    watched = launch({"options": OPTIONS, "environment": ENVIRONMENT}, **ALL)
    done = watched.recompute_traffic(prompts=prompts, new_tokens=40)
    judged, same = clean(done, layers=0)
    assert judged >= 20
    assert same >= 6
    assert done["cached"] > 100
    assert {layer["region"] for answer in done["answers"] for layer in answer["layers"]} == {"full", "swa"}
    for answer in done["answers"]:
        compared = {layer["region"]: layer["tokens"] for layer in answer["layers"]}
        assert compared["full"] == answer["tokens"]
        assert compared["swa"] < answer["tokens"]
    assert done["outputs"] == plain.serve(prompts=prompts, new_tokens=40)["outputs"]


@pytest.fixture(scope="module")
def engine(launch):
    """One that learns its noise once."""
    made = launch({"options": OPTIONS, "environment": ENVIRONMENT}, **BYTES_OFF, CANARY_CONTROL="write")
    made.parked_teach(tokens=110)
    return made


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("short_window", (1, 70, "ill", "attention")),
        ("skipped_layer", (1, 0, "ill", "everywhere")),
        pytest.param("changed_norm", (1, 0, "ill", "brought"), marks=pytest.mark.last),
    ],
)
def test_broken_engines_are_told_and_the_request_beside_is_well(engine, fault, expected):
    """By the KV alone: all checks of bytes are off. A window that is one token short in decodes, and others."""
    done = engine.recompute_broken(fault=fault, tokens=70)
    assert done["verdicts"] == ["differs", "same"], done["answers"]
    assert told(done) == [expected]


def test_what_ended_requests_left_is_compared(engine):
    """As far as the window's part of it is still there."""
    engine.parked_prompt(name="left", tokens=prompt("left", 100))
    done = engine.parked_verify(names=["left"])
    assert [(one["verdict"], one["parked"]) for one in done["answers"]] == [("same", True)]
    assert done["violations"] == []
    compared = {layer["region"]: layer["tokens"] for layer in done["answers"][0]["layers"]}
    assert compared["full"] > compared.get("swa", 0)


def test_a_backend_that_reads_windows_elsewhere_says_so(launch):
    """SGLang's `torch_native`, with a pool of its own for windows: nothing is computed again."""
    options = {**OPTIONS, "attention_backend": "torch_native"}
    done = launch({"options": options}, **ALL).recompute_traffic(prompts=[prompt("on", 40)], new_tokens=40)
    assert done["answers"] == []
    assert "recomputed_requests" not in done["stats"]
