"""One layer's attention is computed a second time in plain torch, in turns, where SGLang computes a request again: wrong
on every path alike is found. SGLang is broken from outside, in all of its forwards."""

import pytest

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("recompute")]

OPTIONS = {"dtype": "float32", "max_total_tokens": 1024}
QUIET = dict(CANARY_READ_CHECK="0", CANARY_SCRUB_BUDGET="0", CANARY_BYTES="off", CANARY_RECOMPUTE="0")
"""All checks of bytes are off."""
LAYERS = 3
WINDOW = 24


@pytest.fixture(scope="module")
def engines(launch):
    """Gives one for each model."""
    made = {}

    def make(model="llama", **options):
        key = f"{model} {options}"
        if key not in made:
            made[key] = launch({"options": {**OPTIONS, "model": model, **options}}, **QUIET)
        return made[key]

    return make


def deviations(done):
    """By layer."""
    return {one["attention"]["layer"]: one["attention"]["deviation"] for one in done["answers"]}


def clean(done):
    """Each layer had its turn, and is well."""
    assert done["violations"] == []
    assert not done["left"]
    assert deviations(done) == dict.fromkeys(range(LAYERS))


@pytest.mark.parametrize(
    ("fault", "model", "options", "wrong"),
    [
        ("scale", "llama", {}, {1}),
        ("head", "llama", {}, {0, 1, 2}),
        ("values", "llama", {}, {0, 1, 2}),
        ("window", "gemma3", {}, {0, 2}),
        ("scale", "llama", {"dtype": "bfloat16"}, {1}),
    ],
)
def test_attention_that_is_wrong_on_every_path_is_found(fault, model, options, wrong, engines):
    """Within as many verifications as there are layers, each broken layer and no other, with the deviation by its name;
    and nothing before or after."""
    engine = engines(model, **options)
    clean(engine.attention_verified())
    done = engine.attention_verified(fault=fault)
    assert {layer for layer, deviation in deviations(done).items() if deviation} == wrong
    assert {deviations(done)[layer] for layer in wrong} == {fault}
    found = [v for v in done["violations"] if v["kind"] == "attention"]
    assert (found[0]["rule"], found[0]["layer"], found[0]["request"]) == (fault, min(wrong), fault)
    assert found[0]["position"] == 0 if fault == "values" else found[0]["position"] < 90
    if fault == "window":
        assert found[0]["position"] >= WINDOW - 1
    if fault == "head":
        assert "of the keys, and the head's own is" in found[0]["detail"]
    assert {one["verdict"] for one in done["answers"] if one["attention"]["deviation"]} == {"differs"}
    told = [event["diagnosis"] for event in done["events"] if event["name"] == "diagnosis"]
    assert told[:1] == ["wrong_attention"]
    clean(engine.attention_verified())
