"""What is noted of each slot on the device is what continuous batching did with its pages."""

import canary_transformers
import pytest
from canary_transformers.conformance.continuous import PAGE_TOKENS, ContinuousSession
from tiny.batching import HAS_POOL

from canary_core.ops.histories import read
from canary_core.records import Clock

pytestmark = [
    pytest.mark.skipif(not HAS_POOL, reason="Transformers 5.17 has no pool that could be followed"),
    pytest.mark.usefixtures("one_thread"),
]


class Engine:
    """Continuous batching under guard, one request at a time."""

    def __init__(self) -> None:
        self.session = ContinuousSession()
        self.guard = canary_transformers.guard(self.session._model, log_level="error")

    @property
    def canary(self):
        """Its Canary, which is there once a request has run."""
        (session,) = self.guard._sessions
        return session.canary

    def serve(self, request: str, prompt: list[int]) -> tuple[dict[int, int], int]:
        """Gives the pages of the request, by the engine's own block table, each with the forward before which it was
        given that, and the request's last forward."""
        self.session.submit(request, prompt, 4)
        pages: dict[int, int] = {}
        while len(self.session.answer(request)) < 4:
            self.session.step()
            for page in self.session._cache.layer_to_allocator[0].block_table.get(request, ()):
                pages.setdefault(page, self.canary.forwards)
        return pages, self.canary.forwards

    def life(self, page: int) -> list[tuple[int, str, str | None]]:
        """Of the page's slots, of which all with something in them have one, oldest first."""
        canary = self.canary
        canary.slots.settle()
        (state,) = canary.states.values()
        now = int(state.shared.clock[Clock.NEXT])
        first, second = (read(state.histories[page * PAGE_TOKENS + i].tolist(), now) for i in (0, 1))
        assert first == second
        return [(h.step, h.event, canary.writers.name(h.who)) for h in first]


@pytest.fixture
def engine():
    """Ended after the test."""
    made = Engine()
    yield made
    made.session.close()
    made.guard.close()


def prompt(factor: int) -> list[int]:
    """Three pages and a part of one more."""
    return [(factor * i + factor) % 90 + 9 for i in range(3 * PAGE_TOKENS + 2)]


def test_a_slots_life_is_the_engines(engine):
    """Full pages: handed out, written, parked, shared by a prefix hit, parked; evicted and handed out again, when the
    pool is full. The last page, of which no hash is known: handed out, written, freed, handed out again."""
    engine.serve("before", prompt(5))
    pages, end = engine.serve("alice", prompt(7))
    whole, *_, rest = pages
    for page, left in ((whole, "park"), (rest, "free")):
        begun = pages[page]
        assert engine.life(page)[-3:] == [(begun - 1, "alloc", None), (begun, "write", "alice"), (end, left, "alice")]

    shared, hit_end = engine.serve("bob", prompt(7))
    hit = shared[whole]
    assert engine.life(whole) == [
        (pages[whole], "write", "alice"),
        (end, "park", "alice"),
        (hit - 1, "share", None),
        (hit_end, "park", "bob"),
    ]
    assert engine.life(rest) == [
        (end, "free", "alice"),
        (shared[rest] - 1, "alloc", None),
        (shared[rest], "write", "bob"),
        (hit_end, "free", "bob"),
    ]

    for number in range(40):
        carol, request = prompt(11 + 2 * number), f"carol-{number}"
        served, end = engine.serve(request, carol)
        if whole in served:
            break
    begun = served[whole]
    kinds = [event for _, event, _ in engine.life(whole)]
    assert kinds[:3] == ["evict", "alloc", "write"]
    assert engine.life(whole)[1:3] == [(begun - 1, "alloc", None), (begun, "write", request)]
