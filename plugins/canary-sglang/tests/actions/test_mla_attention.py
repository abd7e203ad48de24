"""Attention of MLA, whose cache has compressed KV: in both of its forms, in turns, where SGLang computes a request
again. SGLang is broken from outside, in all of its forwards."""

import json

import pytest
from tools.recompute_verdicts import deviations
from tools.recomputes import ASKED, QUIET, prompt

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("recompute")]

LAYERS = 3
FLOATS = ["float32", pytest.param("float16", marks=pytest.mark.takes_turns("the same in float32"))]
TURNS = pytest.mark.takes_turns("a wrong scale, and canary-vllm's and canary-transformers' MLA")
CHUNK = 48
OPTIONS = {
    "max_total_tokens": 1024,
    "max_running_requests": 6,
    "chunked_prefill_size": CHUNK,
    "json_model_override_args": json.dumps({"num_hidden_layers": LAYERS, "first_k_dense_replace": LAYERS}),
}
"""The first chunk of a request expands keys and values, and further ones are absorbed."""


@pytest.fixture(scope="module")
def engines(launch):
    """Gives one for each type of floats."""
    made = {}

    def make(dtype):
        if dtype not in made:
            made[dtype] = launch({"options": {**OPTIONS, "dtype": dtype}}, "mla", **ASKED)
        return made[dtype]

    return make


def clean(done):
    """Each layer had its turn, and is well."""
    assert done["violations"] == []
    assert not done["left"]
    assert deviations(done) == dict.fromkeys(range(LAYERS))
    assert all(one["attention"]["tokens"] > 2 * CHUNK for one in done["answers"])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("fault", "deviation"),
    [
        ("scale", "scale"),
        pytest.param("turned", "head", marks=TURNS),
        pytest.param("turned_before", "values", marks=TURNS),
        pytest.param("stored_otherwise", "keys", marks=TURNS),
    ],
)
def test_attention_that_is_wrong_on_every_path_is_found(fault, deviation, dtype, engines):
    """Within as many verifications as there are layers, in layer 1 and no other; and nothing before or after."""
    engine = engines(dtype)
    clean(engine.attention_verified())
    done = engine.attention_verified(fault=fault)
    assert deviations(done) == {0: None, 1: deviation, 2: None}, done["answers"]
    (found,) = [v for v in done["violations"] if v["kind"] == "attention"]
    assert (found["rule"], found["layer"]) == (deviation, 1)
    clean(engine.attention_verified())
    if fault == "stored_otherwise":
        assert found["detail"] == "the cache holds other compressed KV than the layer has computed"


@pytest.mark.takes_turns("test_recompute's test of compressed KV, in float32")
def test_clean_traffic_is_never_blamed(launch):
    """Hits, chunks and mixed batches in float16: each request that is computed again has a look at attention."""
    engine = launch({"options": {**OPTIONS, "dtype": "float16"}}, "mla", **QUIET, CANARY_RECOMPUTE="100%")
    shared = prompt("shared", 60)
    prompts = [[*(shared[: 8 * (i % 7)] if i % 3 == 0 else []), *prompt(i, 30 + 17 * i % 40)] for i in range(30)]
    done = engine.recompute_traffic(prompts=prompts, new_tokens=40)
    looks = done["stats"]["attention_looks"]
    assert done["violations"] == []
    assert done["stats"]["attention_layers"] == LAYERS
    assert looks == len(done["answers"]) > 20
    assert "attention_differs" not in done["stats"]
