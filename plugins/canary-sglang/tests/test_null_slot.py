"""Real SGLang and its slot 0, where the tokens of padded rows are stored."""

import pytest

pytestmark = pytest.mark.timeout(900)


def prompts(engine, seed):
    """Three, without a prefix in common with others."""
    return [[(7 * i + 13 * seed + 31 * n) % 240 + 3 for i in range(12 + n)] for n in range(3)]


@pytest.fixture(scope="module")
def served(launch):
    """An engine that has served something; nothing was found."""
    engine = launch({}, CANARY_READ_CHECK="0")
    engine.serve(prompts=prompts(engine, 0), new_tokens=3)
    assert engine.findings()["violations"] == []
    return engine


@pytest.mark.parametrize(("layer", "half"), [(1, "v"), (2, "k")])
def test_nan_that_padded_rows_store_is_found(served, layer, half):
    """In the slot of padding, with layer and half, once; nothing else is."""
    done = served.pad_with_nan(prompts=prompts(served, 1 + layer), layer=layer, half=half)
    assert done["padded"] > 3
    (found,) = done["violations"]
    assert (found["kind"], found["phase"], found["slot"]) == ("non_finite", "post_forward", 0)
    assert (found["layer"], found["half"]) == (layer, half)
    assert found["explanation"].startswith(f"NaN or infinite values got into the null slot 0 of {half}.{layer},")


def test_a_live_token_in_the_slot_of_padding_is_found(served):
    """The request whose token it is, and its position; from then on the request's own slot holds nothing of it."""
    done = served.store_in_null_slot(prompts=prompts(served, 5))
    found = done["violations"]
    (null,) = [v for v in found if v["kind"] == "null_slot"]
    assert (null["phase"], null["slot"], null["request"]) == ("post_forward", 0, done["request"])
    assert null["position"] == done["position"]
    assert "writes position" in null["explanation"]
    assert "to the null slot 0, where it is lost" in null["explanation"]
    assert {v["slot"] for v in found if v is not null} <= {done["slot"]}
