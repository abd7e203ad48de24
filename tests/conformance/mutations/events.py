"""Wrong events between forwards."""

from typing import Any

import pytest
from canary_toy.hooks import ToyGuard
from canary_toy.pool import REGION
from canary_toy.toy_engine import PAGE, KVPool
from conformance.mutations.changes import Break, before_each, copies, doubled, instead, no_pages, region_name


def rolled_back(tell: Any) -> Break:
    """What is told of a page that is kept: ``tell(slots, page, kept, dropped)``, with the slots of the page."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        def told(self: ToyGuard, _: None, request: Any, tokens: int) -> None:
            kept = request.computed % PAGE
            if kept:
                tell(self.canary.slots, self._slots(request.pages[-1]), kept, max(tokens, 1))

        patch.setattr(ToyGuard, "_rolled_back", told)

    return apply


def copied(tell: Any) -> Break:
    """What is told of a copied page: ``tell(slots, source, destination)``, with the slots of both pages."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        def told(self: ToyGuard, _: None, source: int, destination: int) -> None:
            tell(self.canary.slots, self._slots(source), self._slots(destination))

        patch.setattr(ToyGuard, "_copied", told)

    return apply


def copied_early(patch: pytest.MonkeyPatch) -> None:
    """A copy is told before it is made."""
    right = ToyGuard.__init__
    patch.setattr(ToyGuard, "_copied", lambda self, _, source, destination: None)

    def init(self: ToyGuard, engine: Any, config: Any) -> None:
        right(self, engine, config)

        def early(source: int, destination: int) -> None:
            self.canary.slots.copy(REGION, self._slots(source), self._slots(destination))
            KVPool.copy_page(engine.pool, source, destination)

        engine.pool.copy_page = early

    patch.setattr(ToyGuard, "__init__", init)


def beside(event: str, *others: str) -> Break:
    """``others`` are told right after each ``event``, of the same slots."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        right = ToyGuard._tell

        def tell(self: ToyGuard, told: Any, pages: Any) -> None:
            name = told.__name__
            right(self, told, pages)
            for other in others if name == event else ():
                if other in ("clear", "forget"):
                    for page in pages:
                        getattr(self.canary.slots, other)(REGION, self._slots(page))
                else:
                    right(self, getattr(self.canary.slots, other), pages)

        patch.setattr(ToyGuard, "_tell", tell)

    return apply


def told_first(event: str, ahead: str) -> Break:
    """``ahead`` is told right before each ``event``, of the same pages."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        right = ToyGuard._tell

        def tell(self: ToyGuard, told: Any, pages: Any) -> None:
            if told.__name__ == event:
                right(self, getattr(self.canary.slots, ahead), pages)
            right(self, told, pages)

        patch.setattr(ToyGuard, "_tell", tell)

    return apply


EVENTS: dict[str, Break] = {
    "no events are told": instead(alloc=None, free=None, park=None, share=None, evict=None),
    "alloc is not told": instead(alloc=None),
    "free is not told": instead(free=None),
    "park is not told": instead(park=None),
    "share is not told": instead(share=None),
    "evict is not told": instead(evict=None),
    "park is told as free": instead(park="free"),
    "evict is told as free": instead(evict="free"),
    "share is told as alloc": instead(share="alloc"),
    "free is told as park": instead(free="park"),
    "alloc and free are exchanged": instead(alloc="free", free="alloc"),
    "free is told twice": doubled("free"),
    "alloc is told twice": doubled("alloc"),
    "events name another region": region_name,
    "events count pages as slots": no_pages,
    "a fork's copy is not told": copies(lambda source, destination: None),
    "a fork's copy is told the wrong way round": copies(lambda source, destination: (destination, source)),
    "all slots are forgotten before each forward": before_each(lambda s: s.canary.slots.forget(REGION, None)),
    "all slots are cleared before each forward": before_each(lambda s: s.canary.slots.clear(REGION, None)),
    "a roll back is not told": rolled_back(lambda slots, page, kept, dropped: None),
    "a roll back clears one slot too many": rolled_back(
        lambda slots, page, kept, dropped: slots.clear(REGION, page[kept - 1 :])
    ),
    "a roll back clears the whole page": rolled_back(lambda slots, page, kept, dropped: slots.clear(REGION, page)),
    "a roll back clears one slot too few": rolled_back(
        lambda slots, page, kept, dropped: slots.clear(REGION, page[kept + 1 :])
    ),
    "a roll back clears one slot": rolled_back(
        lambda slots, page, kept, dropped: slots.clear(REGION, page[kept : kept + 1])
    ),
    "a roll back forgets": rolled_back(lambda slots, page, kept, dropped: slots.forget(REGION, page[kept:])),
    "a roll back frees": rolled_back(lambda slots, page, kept, dropped: slots.free(REGION, page[kept:])),
    "a roll back clears a page by its number": rolled_back(
        lambda slots, page, kept, dropped: slots.clear(REGION, page[:1] // PAGE, page_slots=PAGE)
    ),
    "a roll back clears all slots": rolled_back(lambda slots, page, kept, dropped: slots.clear(REGION, None)),
    "a copy is told of two slots of a page": copied(
        lambda slots, source, destination: slots.copy(REGION, source[:2], destination[:2])
    ),
    "a copy is told without its first slot": copied(
        lambda slots, source, destination: slots.copy(REGION, source[1:], destination[1:])
    ),
    "a copy is told without its last slots": copied(
        lambda slots, source, destination: slots.copy(REGION, source[:1], destination[:1])
    ),
    "a copy is told as forget": copied(lambda slots, source, destination: slots.forget(REGION, destination)),
    "a copy is told as clear": copied(lambda slots, source, destination: slots.clear(REGION, destination)),
    "a copy is told, and forgotten": copied(
        lambda slots, source, destination: (
            slots.copy(REGION, source, destination),
            slots.forget(REGION, destination[1:]),
        )
    ),
    "a copy is told in reverse order": copied(
        lambda slots, source, destination: slots.copy(REGION, source, destination.flip(0))
    ),
    "a copy is told before it is made": copied_early,
    "a copy's bytes are forgotten": copied(
        lambda slots, source, destination: (
            slots.copy(REGION, source, destination),
            slots.settle(),
            slots.forget_bytes(REGION, destination),
        )
    ),
    "forget is told at a hit": beside("share", "forget"),
    "forget is told where slots are parked": beside("park", "forget"),
    "forget is told where slots are handed out": beside("alloc", "forget"),
    "forget is told where slots are freed": beside("free", "forget"),
    "clear is told at a hit": beside("share", "clear"),
    "clear is told where slots are parked": beside("park", "clear"),
    "alloc is told at a hit, beside share": beside("share", "alloc"),
    "free is told where slots are evicted, beside evict": beside("evict", "free"),
    "free is told where slots are parked, beside park": beside("park", "free"),
    "park is told twice": doubled("park"),
    "evict is told twice": doubled("evict"),
    "evict is told at a hit": told_first("share", "evict"),
    "share is told where slots are handed out": told_first("alloc", "share"),
}
"""By name, in the order of the table in the docs."""
