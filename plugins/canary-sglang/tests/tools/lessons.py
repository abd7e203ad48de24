"""Internal requests from which the noise is learnt, under pressure, and after the noise is known."""

from typing import Any

from tools.inspection import findings
from tools.recomputes import _left, _sent, begin, finish, prompt, verify

HEAD = prompt("head", 48)
"""All prompts begin so."""


def lesson_pressed(engine: Any, how: str) -> dict[str, Any]:
    """A lesson decodes beside a request ``long``, of which somebody has asked. Then more requests come than there are
    seats (``crowd``), the pool is full for a while (``full``), or the client aborts it (``abort``). Gives whether the
    lesson was there after each of the next two turns, whether another one began, and how often users were retracted."""
    _cache_the_head(engine)
    sent = _sent(engine)
    engine.submit([*HEAD, *prompt("long", 20)], 180, "long")
    for _ in range(4):
        engine.step()
    asked = engine.session.canary.verifier.ask("long")
    own = engine.session.recompute._own
    _until(engine, lambda: own.lesson is not None and len(own.lesson.output_ids) > 2)
    first, allocator, taken = own.lesson, engine.scheduler.token_to_kv_pool_allocator, None
    if how == "crowd":
        for number in range(6):
            engine.submit([*HEAD, *prompt(f"crowd {number}", 20)], 30, f"crowd {number}")
    elif how == "abort":
        engine.abort("long")
    else:
        taken = allocator.alloc(allocator.available_size())
    there = []
    for _ in range(2):
        engine.step()
        there.append(own.lesson is first)
    if taken is not None:
        allocator.free(taken)
    again = False
    for _ in range(0 if how == "abort" else 120):
        engine.step()
        again = again or own.lesson not in (None, first)
    finish(engine, "long")
    retracted = sum(request.retraction_count for request in engine.requests)
    verdict = asked.result(0)[0].verdict if asked.done() else None
    return {
        "there": there, "again": again, "retracted": retracted, "asked": verdict, **_left(engine, sent),
        **findings(engine),
    }  # fmt: skip


def lesson_learnt(engine: Any) -> dict[str, Any]:
    """All requests have a hit, until the noise is known; then a norm's weight of layer 0 changes under the kept cache,
    past torch's counters, and ``ill`` hits. Gives what was found before, and then."""
    _cache_the_head(engine)
    pairs, number = engine.session.recompute.pairs, 0
    while not pairs.judge.noise.known:
        if number == 90:
            raise RuntimeError("the noise is not known after 90 requests")
        if sum(not request.finished() for request in engine.requests) < 3:
            engine.submit([*HEAD, *prompt(f"tail {number}", 20)], 70)
            number += 1
        engine.step()
    while engine.step():
        pass
    before = findings(engine)
    engine.runner.model.model.layers[0].post_attention_layernorm.weight.data.mul_(1.05)
    begin(engine, {"ill": [*HEAD, *prompt("ill", 30)]}, 2)
    (answer,) = verify(engine, "ill")
    finish(engine, "ill")
    return {"before": before["violations"], "verdict": answer["verdict"], **findings(engine)}


def _cache_the_head(engine: Any) -> None:
    engine.submit(HEAD, 1)
    while engine.step():
        pass


def _until(engine: Any, condition: Any) -> None:
    while not condition():
        if not engine.step():
            raise RuntimeError("nothing runs any more")
