"""What a layer stores is still there when the forward has ended: SGLang's pools, in the thorough profile."""

import pytest

LOOKS = {"CANARY_STORE_CHECK": "true", "CANARY_SCRUB_BUDGET": "0", "CANARY_READ_CHECK": "0"}

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("mha", marks=pytest.mark.takes_turns("stores of each pool, without an engine, and canary-vllm's")),
        pytest.param("pressure", marks=pytest.mark.beyond_ci("clean traffic and a stray write of MHA")),
        pytest.param("swa", marks=pytest.mark.beyond_ci("clean traffic and a stray write of MHA")),
        pytest.param("mla", marks=pytest.mark.beyond_ci("clean traffic and a stray write of MHA")),
    ],
)
def test_stores_are_looked_at(start, name):
    """Clean traffic is silent, and each layer of each forward is looked at. Then the store of the last layer also
    changes what the first one has just stored: told at once, with the layer, as something that happened within the
    forward."""
    engine = start(name, **LOOKS)
    engine.serve(prompts=engine.setup.traffic(1), new_tokens=engine.setup.new_tokens)
    found = engine.findings()
    layers = len({s.split(".")[1] for r in engine.regions().values() for s in r["sources"]})
    assert found["violations"] == []
    assert found["stats"]["noted_stores"] == layers * found["stats"]["forwards"]
    engine.flush()
    slot = engine.scribble_within_a_forward(prompt=engine.setup.traffic(2)[0])
    found = engine.findings()["violations"]
    assert [(v["kind"], v["phase"], v["slot"], v["layer"]) for v in found] == [("bytes", "post_forward", slot, 0)]
    assert "changed between the store of layer 0 and the end of the forward" in found[0]["explanation"]
    assert found[0]["request"].startswith("r")
