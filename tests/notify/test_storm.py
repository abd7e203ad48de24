"""A storm of findings, as of a bad memory chip: the engine is taken out of service once, the log stays short, and what
was quarantined comes back."""

import pytest
import torch
from support.guarded import Guarded
from support.toy import Request, ToyEngine

from canary_core import Kind, Verdict, hookimpl

ROUNDS, TOKENS, LAYERS = 40, 12, 4
FINDINGS = ROUNDS * TOKENS * LAYERS * 2


class Cache:
    """A prefix cache of the toy engine that gives up what a verdict says, as engines' plugins do: the slot goes back to
    the free list, and is handed out again."""

    def __init__(self) -> None:
        self.guarded: Guarded | None = None
        self.parked: set[int] = set()
        self.condemned: set[int] = set()

    @hookimpl
    def canary_verdict(self, verdict: Verdict) -> None:
        """Kept until the step is over."""
        assert verdict.slot is not None
        self.condemned.add(verdict.slot)

    def tell(self, event: str, slots: list[int]) -> None:
        """To the guard."""
        if slots:
            getattr(self.guarded.canary.slots, event)("full", torch.tensor(slots))

    def serve(self, name: str) -> Request:
        """A request that is computed, ends, and leaves its KV."""
        engine = self.guarded.engine
        self.tell("alloc", engine.free[:TOKENS])
        request = self.guarded.submit(name, TOKENS)
        self.guarded.step(TOKENS)
        engine.requests.remove(request)
        self.parked |= set(request.slots)
        self.tell("park", request.slots)
        return request

    def act(self) -> None:
        """After a step: evicts what was condemned and is parked."""
        gone = sorted(self.condemned & self.parked)
        self.condemned.clear()
        self.parked -= set(gone)
        self.tell("evict", gone)
        self.guarded.engine.free += gone


@pytest.mark.parametrize("repair", [False, True])
def test_a_storm_of_flips_takes_the_engine_out_once_and_loses_nothing(tmp_path, logs, repair):
    """All KV that a request leaves is damaged in every layer, request after request: thousands of findings. ``unready``
    is told once; some incidents are told, the others counted; each damaged slot is evicted and written again, and then
    right. With ``CANARY_REPAIR`` what can't be repaired goes the same way."""
    file, cache = tmp_path / "unready", Cache()
    settings = dict(on_violation="quarantine", scrub_budget="4MiB", unready_file=str(file), repair=repair)
    engine = ToyEngine(slots=64, layers=LAYERS)
    guarded = cache.guarded = Guarded(engine, cache, **settings)
    free = len(engine.free)
    beside = engine.submit("beside", [5] * 2)
    for number in range(ROUNDS):
        request = cache.serve(f"request {number}")
        for tensor in (*engine.k, *engine.v):
            # Two words of each: nothing to repair.
            tensor.view(torch.int32)[request.slots, 2:4] ^= 1 << 30
        for _ in range(3):
            guarded.step(1)
            cache.act()
        assert len(engine.free) == free - len(beside.slots), "a block was lost"
    found = guarded.canary.stats()
    counted = int(guarded.canary.states["full"].shared.counters[Kind.BYTES])
    assert counted >= FINDINGS
    assert {v.kind for v in guarded.violations} == {Kind.BYTES}
    guarded.canary.drain()
    assert file.exists()
    assert len(guarded.findings.told("unready")) == 1
    assert len(guarded.findings.told("incident")) <= guarded.canary.config.incident_limit
    assert len([line for line in logs if line["log_level"] != "debug"]) < FINDINGS / 40
    assert ("repair_declined" in found, "repaired" in found) == (repair, False)
    # What was quarantined is in use again, and nothing of it is wrong.
    told = len(guarded.violations)
    for number in range(4):
        cache.serve(f"later {number}")
        guarded.step(1)
        cache.tell("evict", sorted(cache.parked))
        engine.free += sorted(cache.parked)
        cache.parked.clear()
    for _ in range(4):
        guarded.step(1)
    guarded.canary.drain()
    assert int(guarded.canary.states["full"].shared.counters[Kind.BYTES]) == counted
    assert len(guarded.violations) == told
    assert len(guarded.findings.told("unready")) == 1
