"""Proofs of an idle engine whose pool is full of the radix cache: they take a hundredth of it, and no more."""

import pytest
from tools.recomputes import OPTIONS, QUIET, prompt

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("recompute")]

SLOTS = 12000
MOST = SLOTS // 100
LENGTHS = {f"full {n}": 53 for n in range(SLOTS // 60 + 10)}
"""Each leaves its prompt and its answer, sixty slots but for the first tokens that some have in common."""
ROOMY = {"options": {**OPTIONS, "max_total_tokens": SLOTS}}


@pytest.fixture(scope="module", params=["python", "rust"])
def roomy(launch, request):
    """An engine that proves what it can, with a pool of which a hundredth is enough for a short prefix."""
    options = {**ROOMY["options"], "tree_core": request.param}
    engine = launch({"options": options}, **QUIET, CANARY_RECOMPUTE="100%")
    engine.parked_teach()
    return engine


def left(engine):
    """Of the requests of `LENGTHS`, oldest first, those of which anything is left, with the number of tokens."""
    return [(name, tokens) for name, tokens in engine.parked_left().items() if tokens > 32 and name in LENGTHS]


def counted(engine):
    """What proofs have evicted so far."""
    return engine.findings()["stats"].get("parked_evicted", 0)


def test_a_full_cache_is_proven_with_a_hundredth_of_it(launch, roomy):
    """One prefix after the other, in slots that the next request would have taken; answers are as without Canary. A
    prefix of other weights is told."""
    plain = launch(ROOMY, CANARY_MODE="off")
    outputs = plain.parked_serve(lengths=LENGTHS)
    roomy.parked_idle(turns=1, seconds=0.0, share=0.0)
    assert roomy.parked_serve(lengths=LENGTHS) == outputs
    before, free = left(roomy), roomy.parked_idle(turns=1, seconds=0.0)["free"]
    assert free < 60
    done = roomy.parked_idle(turns=160, seconds=0.06, share=1.0)
    proven = [name for name, _, _ in done["answers"]]
    assert len(proven) == len(set(proven)) >= 40
    assert {verdict for _, verdict, _ in done["answers"]} == {"same"}
    after, gone = left(roomy), counted(roomy)
    changed = [one for one in before if one not in after]
    assert changed == before[: len(changed)]
    assert 0 < gone == done["free"] - free <= MOST
    roomy.parked_idle(turns=1, seconds=0.0, share=0.0)
    again = {name: [*prompt(name, 53)[:40], *prompt("later", 30)] for name, _ in after[-6:]}
    for name, tokens in again.items():
        assert roomy.parked_prompt(name=name, tokens=tokens) == plain.parked_prompt(name=name, tokens=tokens)
    roomy.parked_weight(factor=1.05)
    try:
        done = roomy.parked_idle(turns=12, seconds=0.06, share=1.0)
    finally:
        roomy.parked_weight(factor=1 / 1.05)
    assert {verdict for _, verdict, _ in done["answers"]} == {"differs"}
    assert len(done["violations"]) == len(done["answers"]) >= 3


def test_what_takes_more_is_not_proven(roomy):
    """A prefix longer than a hundredth of the pool: nothing more is evicted for it, and that is counted."""
    roomy.parked_idle(turns=1, seconds=0.0, share=0.0)
    roomy.parked_serve(lengths={f"long {n}": 200 for n in range(SLOTS // 200 + 5)})
    before, stats = roomy.parked_left(), roomy.findings()["stats"]
    whole = [name for name, tokens in before.items() if tokens > 200]
    done = roomy.parked_idle(turns=40, seconds=0.06, share=1.0)
    assert len(whole) > 50
    assert not {name for name, _, _ in done["answers"]} & {*whole}
    assert sum(before.values()) - sum(roomy.parked_left().values()) <= MOST
    assert done["stats"]["parked_evicted"] - stats["parked_evicted"] <= MOST
    assert done["stats"]["parked_no_room"] - stats.get("parked_no_room", 0) >= 5
