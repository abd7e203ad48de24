"""Real SGLang on a CPU answers what is right, by an oracle in the place of its model: with prefix hits, chunks,
retraction, drafts that are rejected, under guard."""

import pytest
from engines.setups import SPECULATION_COVERED_BY

pytestmark = [pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "name",
    [
        "mha",
        pytest.param("pressure", marks=pytest.mark.takes_turns("the same with room for all")),
        pytest.param("eagle", marks=pytest.mark.beyond_ci(SPECULATION_COVERED_BY)),
    ],
)
def test_every_answer_is_right(start, name):
    """Twice the same traffic: the second time most of it comes from the prefix cache."""
    engine = start(name)
    setup = engine.setup
    for _ in range(2):
        asked = engine.ask(prompts=setup.traffic(0), new_tokens=setup.new_tokens)
        assert asked["outputs"] == asked["right"]
    assert engine.findings()["violations"] == []
    assert sum(asked["cached"]) > 0


@pytest.mark.takes_turns("batches/test_sampled.py: exchanged tokens are found")
def test_exchanged_next_tokens_make_wrong_answers(start):
    """The oracle sees what Canary tells: after two tokens were exchanged those two requests answer wrongly."""
    engine = start("mha")
    prompts = engine.setup.traffic(1, 4)
    asked = engine.ask(prompts=prompts, new_tokens=4)
    assert asked["outputs"] == asked["right"]
    concerned = engine.mix_up(what="exchanged", prompts=prompts)
    wrong = {v["request"] for v in engine.findings()["violations"] if v["kind"] == "write_input"}
    assert wrong == set(concerned)
    assert set(engine.wrong_answers()) == wrong
