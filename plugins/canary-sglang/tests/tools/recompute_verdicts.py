"""What came of requests that were computed again, and settings under which nothing else is found."""

from typing import Any

ALL = dict(CANARY_RECOMPUTE="100%", CANARY_READ_CHECK="0", CANARY_SCRUB_BUDGET="0")


def clean(done: dict[str, Any], layers: int = 3) -> tuple[int, int]:
    """All judged requests are the same; nothing of the internal ones is left, or went to clients. ``layers``: number of
    those with a reference of attention."""
    verdicts = [answer["verdict"] for answer in done["answers"]]
    reasons = {answer["reason"] for answer in done["answers"] if answer["verdict"] == "unjudged"}
    assert done["on"]
    assert done["violations"] == []
    assert not done["leaked"]
    assert not [name for name in done["inserted"] if name.startswith("canary")]
    assert not [name for name in done["names"] if name.startswith("canary")]
    assert "differs" not in verdicts
    assert all("noise" in reason for reason in reasons), reasons
    stats = done["stats"]
    assert stats.get("attention_layers", 0) == layers
    assert {"attention_differs", "attention_unjudged"}.isdisjoint(stats)
    assert stats.get("attention_looks", 0) == (len(verdicts) if layers else 0)
    return len(verdicts), verdicts.count("same")


def told(done: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Layer, position, request and rule of each finding of a recompute; of a state no position."""
    return [
        (v["layer"], v.get("position"), v["request"], v["rule"]) for v in done["violations"] if v["kind"] == "recompute"
    ]


def deviations(done: dict[str, Any]) -> dict[int, str | None]:
    """Of attention, by layer."""
    return {one["attention"]["layer"]: one["attention"]["deviation"] for one in done["answers"]}


def states_compared(done: dict[str, Any]) -> list[bool]:
    """Of each answer, whether recurrent states were compared."""
    return [any(one["region"] == "mamba" for one in answer["layers"]) for answer in done["answers"]]
