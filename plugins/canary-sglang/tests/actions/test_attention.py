"""One layer's attention is computed a second time in plain torch, in turns, where SGLang computes a request again:
wrong on every path alike is found. SGLang is broken from outside, in all of its forwards."""

import pytest
from engines.attention_models import IN_TRITON, TYPES, WINDOW
from tools.recompute_verdicts import deviations
from tools.recomputes import ASKED

from canary_adapters import ATTENTION_TYPES

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("recompute")]

OPTIONS = {"dtype": "float32", "max_total_tokens": 1024}
FP8 = {"kv_cache_dtype": "fp8_e4m3"}
LAYERS = 3
TRITON = {"TRITON_INTERPRET": "1"}
PASSED = {**TRITON, "SGLANG_SWA_EVICTION_INTERVAL": "1"}
"""Where windows have a pool of their own, they give up a token with each forward."""
BEYOND = pytest.mark.beyond_ci("the same on a model that starts sooner")
BESIDE = pytest.mark.takes_turns("the same in float32")
"""Those with KV in fp8 have one turn, since they share an engine."""
IN_FP8 = pytest.mark.takes_turns("the same in float32", unit="attention in fp8")


@pytest.fixture(scope="module")
def engines(launch):
    """Gives one for each model."""
    made = {}

    def make(model="llama", **options):
        key = f"{model} {options}"
        if key not in made:
            made[key] = launch({"options": {**OPTIONS, "model": model, **options}}, **ASKED)
        return made[key]

    return make


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
        ("window", "gemma3_text_attention", {}, {0, 2}),
        pytest.param("scale", "llama", {"dtype": "bfloat16", "enable_mixed_chunk": True}, {1}, marks=BESIDE),
        pytest.param("scale", "llama", FP8, {1}, marks=IN_FP8),
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


@IN_FP8
@pytest.mark.parametrize("options", [FP8, {"kv_cache_dtype": "fp8_e5m2", "dtype": "bfloat16"}], ids=str)
def test_a_wrong_scale_of_fp8_is_found_and_its_layer_named(options, engines):
    """K of one layer is stored under a scale that attention does not read it by."""
    engine = engines("llama", **options)
    clean(engine.attention_verified())
    done = engine.attention_verified(fault="stored_scale")
    assert {layer: deviation for layer, deviation in deviations(done).items() if deviation} == {1: "keys"}
    clean(engine.attention_verified())


@pytest.mark.parametrize(
    ("model", "environment", "deviation", "detail"),
    [
        pytest.param(
            "mistral_window_attention",
            {},
            "window",
            "that of no window, and the configuration says 24",
            marks=pytest.mark.takes_turns("a window that is broken from outside"),
        ),
        pytest.param("smollm3_window_attention", {}, "window", "that of a window of 25", marks=BEYOND),
        pytest.param("gemma2_attention", TRITON, "soft_cap", "that of uncapped logits", marks=BEYOND),
    ],
)
def test_what_sglang_itself_computes_otherwise_is_found(model, environment, deviation, detail, launch):
    """Unmodified: its Mistral has no window, that of models that it takes from Transformers is one token too long, and
    its attention in plain torch has no cap."""
    fields = {"options": {**OPTIONS, "model": model}, "environment": environment}
    done = launch(fields, **ASKED).attention_verified()
    found = deviations(done)
    assert (found[0], set(found.values()) - {None}) == (deviation, {deviation})
    assert all(detail in v["detail"] for v in done["violations"])


@pytest.mark.beyond_ci("Llama, Gemma 3 and Mistral above: a rule is the same for all engines")
@pytest.mark.parametrize("kind", sorted(TYPES))
def test_each_known_type_computes_what_its_rule_says(kind, launch):
    """And another scale is told."""
    options = {**OPTIONS, "model": f"{kind}_attention"}
    if kind in IN_TRITON:
        fields = {"options": {**options, "attention_backend": "triton"}, "environment": PASSED}
    else:
        fields = {"options": options}
    engine = launch(fields, **ASKED)
    clean(engine.attention_verified())
    assert "scale" in deviations(engine.attention_verified(fault="all_scales")).values()


def test_there_is_a_model_of_each_type():
    """Each rule is compared with SGLang's own code."""
    assert TYPES.keys() == ATTENTION_TYPES


@pytest.mark.parametrize(("fault", "reason"), [("graph", "graph is replayed"), ("stored_before", "another function")])
def test_a_forward_that_can_not_be_looked_at_is_counted(fault, reason, engines):
    """With a reason that is told once."""
    engine = engines()
    before = engine.findings()["stats"]
    done = engine.attention_verified(fault=fault)
    assert [one["attention"] for one in done["answers"]] == [None] * LAYERS
    assert done["violations"] == []
    assert done["stats"]["attention_unjudged"] - before.get("attention_unjudged", 0) == LAYERS
    assert done["stats"].get("attention_looks", 0) == before.get("attention_looks", 0)
    told = [event["reason"] for event in done["events"] if event["name"] == "unjudged"]
    assert len([one for one in told if reason in one]) == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        pytest.param(
            {"options": {**FP8, "attention_backend": "triton"}, "environment": TRITON},
            "stored as torch.float8_e4m3fn, and nobody has shown how TritonAttnBackend reads it",
            marks=pytest.mark.takes_turns("canary-vllm's layers without a reference"),
        ),
        pytest.param(
            {"options": {**FP8, "model": "deepseek_v2", "attention_backend": "triton"}, "environment": TRITON},
            "stored as torch.float8_e4m3fn, and nobody has shown how compressed KV is read",
            marks=BEYOND,
        ),
    ],
)
def test_layers_without_a_reference_are_told(fields, reason, launch):
    """By an event, once, and a counter that stays zero."""
    done = launch({**fields, "options": {**OPTIONS, **fields["options"]}}, **ASKED).attention_verified()
    assert all(one["attention"] is None for one in done["answers"])
    assert done["stats"].get("attention_layers", 0) == 0
    told = [event["reason"] for event in done["events"] if event["name"] == "unjudged"]
    assert [reason in text for text in told if "has no reference" in text] == [True]
