"""Models with windows in a pool of their own, computed again by SGLang's scheduler: full layers are compared wholly,
those with a window as far as it still holds tokens."""

import pytest
from tools.recompute_verdicts import ALL, clean, told
from tools.recomputes import QUIET, prompt

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("windows"),
    pytest.mark.takes_turns("models without windows, and canary-vllm's windows", unit="windows"),
]

FIELDS = {
    "options": {
        "model": "gpt_oss_window_attention", "dtype": "float32", "max_total_tokens": 1536, "max_running_requests": 6,
        "attention_backend": "triton", "triton_attention_num_kv_splits": 1,
    },
    "environment": {"TRITON_INTERPRET": "1", "SGLANG_SWA_EVICTION_INTERVAL": "1"},
}  # fmt: skip
"""Windows give up a token with each forward; by default every 128th."""


@pytest.fixture(scope="module")
def engine(launch):
    """One that learns its noise once."""
    made = launch(FIELDS, **QUIET, CANARY_CONTROL="write")
    made.mend_windows()
    made.parked_teach(tokens=110)
    return made


def test_clean_traffic_is_well_and_answers_stay_the_same(engine, launch):
    """Hits and chunks, longer than the window; and nothing else is told, with all bytes looked at."""
    shared = prompt("shared", 60)
    prompts = [[*(shared[: 30 + 5 * (i % 6)] if i % 3 == 0 else []), *prompt(i, 40 + 7 * (i % 5))] for i in range(18)]
    watched = launch(FIELDS, **ALL)
    watched.mend_windows()
    done = watched.recompute_traffic(prompts=prompts, new_tokens=40)
    judged, same = clean(done)
    assert judged >= 14
    assert same >= 2
    assert done["cached"] > 100
    assert {layer["region"] for answer in done["answers"] for layer in answer["layers"]} == {"full", "swa"}
    passed = 0
    for answer in done["answers"]:
        compared = {layer["region"]: layer["tokens"] for layer in answer["layers"]}
        assert compared["full"] == answer["tokens"]
        passed += compared.get("swa", 0) < answer["tokens"]
    assert passed >= 4
    assert done["outputs"][:6] == engine.serve(prompts=prompts[:6], new_tokens=40)["outputs"]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("short_window", (1, 70, "ill", "attention")),
        ("skipped_layer", (1, 0, "ill", "everywhere")),
        pytest.param("changed_norm", (1, 0, "ill", "brought"), marks=pytest.mark.last),
    ],
)
def test_broken_engines_are_told_and_the_request_beside_is_well(engine, fault, expected):
    """By the KV alone: all checks of bytes are off. A window that is one token short in decodes, which is how SGLang
    0.5.21 has it, and others."""
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
    options = {**FIELDS["options"], "model": "cohere2", "attention_backend": "torch_native"}
    engine = launch({"options": options}, **ALL)
    done = engine.recompute_traffic(prompts=[prompt(f"on {i}", 60) for i in range(6)], new_tokens=40)
    (off,) = [event for event in engine.events() if event["name"] == "recompute_off"]
    assert off["reason"].startswith("torch_native stores a window's KV")
    assert done["answers"] == []
    assert "recomputed_requests" not in done["stats"]
