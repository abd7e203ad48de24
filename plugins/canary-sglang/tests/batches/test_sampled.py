"""Real SGLang on a CPU: what the sampler gave is what the next forward computes."""

import pytest

pytestmark = [pytest.mark.timeout(900)]


def told(engine):
    """Findings that say what the sampler gave: kind, request, position, that token, and the token that was there."""
    found = engine.findings()["violations"]
    return [
        (v["kind"], v["request"], v["position"], v["token"], v["stored_token"])
        for v in found
        if "the sampler gave" in v["explanation"]
    ]


def test_exchanged_next_tokens_are_found(start):
    """The tokens of two requests change places after they were sampled: the forward that computes them tells each
    request, its position, what was sampled, and what was computed. Clean traffic before and after it is silent, and
    nearly every decoded token was compared."""
    engine = start("mha")
    setup = engine.setup
    served = engine.serve(prompts=setup.traffic(0), new_tokens=setup.new_tokens)
    clean = engine.findings()
    assert clean["violations"] == []
    decoded = sum(len(output) - 1 for output in served["outputs"])
    assert clean["stats"]["sampled_tokens"] >= decoded
    concerned = engine.mix_up(what="exchanged", prompts=setup.traffic(1, 4))
    (a, (at, given)), (b, (bt, other)) = concerned.items()
    found = told(engine)
    assert {("write_input", a, at, given, other), ("write_input", b, bt, other, given)} <= set(found)
    assert {(position, token) for kind, _, position, token, _ in found if kind == "token"} <= {(at, given), (bt, other)}
    engine.flush()
    engine.serve(prompts=setup.traffic(2), new_tokens=setup.new_tokens)
    assert engine.findings()["violations"] == []
