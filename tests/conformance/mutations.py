"""Wrong plugins: each mutation breaks the toy engine's plugin in one way that an author might."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from canary_toy import hooks
from canary_toy.batch import ToyBatch
from canary_toy.hooks import ToyGuard, ToyHooks
from canary_toy.pool import REGION, ToyPool
from canary_toy.toy_engine import PAGE

from canary_core import BatchView, KVSource, Region, SlotTable, Uncovered

Break = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutation:
    """One bug: its name, and what breaks the plugin."""

    name: str
    apply: Break


def _regions(change: Callable[[Region], Region]) -> Break:
    """The adapter's region, changed."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        right = ToyPool.regions
        patch.setattr(ToyPool, "regions", lambda pool: [change(region) for region in right(pool)])

    return apply


def _sources(change: Callable[[list[KVSource]], list[KVSource]]) -> Break:
    return _regions(lambda region: replace(region, sources=tuple(change(list(region.sources)))))


def _each(**fields: Any) -> Break:
    """Fields of every source; a function gets the source."""
    return _sources(
        lambda sources: [replace(s, **{k: v(s) if callable(v) else v for k, v in fields.items()}) for s in sources]
    )


def _cloned(source: KVSource) -> KVSource:
    return replace(source, tensor=source.tensor.clone())


def _heads_first(source: KVSource) -> KVSource:
    """As if a page were [heads, tokens, dim]."""
    head = source.slot_bytes // 2
    return replace(source, chunks=2, chunk_bytes=head, slot_stride_bytes=head, chunk_stride_bytes=head * PAGE)


_first_pool: list[Any] = []


def _pool_of_first_engine(patch: pytest.MonkeyPatch) -> None:
    """A pool that is kept from an earlier engine."""
    right = ToyPool.__init__
    _first_pool.clear()

    def init(self: ToyPool, pool: Any) -> None:
        _first_pool.append(pool)
        right(self, _first_pool[0])

    patch.setattr(ToyPool, "__init__", init)


def _view(change: Callable[[BatchView, Any], BatchView | None]) -> Break:
    """The adapter's view, changed; the function gets the batch as well."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        right = ToyBatch.view
        patch.setattr(ToyBatch, "view", lambda self, batch: change(right(self, batch), batch))

    return apply


def _fields(**changes: Callable[[Any], Any]) -> Break:
    """Fields of the view, each by a function of what is right."""
    return _view(lambda view, _: dataclasses.replace(view, **{n: c(getattr(view, n)) for n, c in changes.items()}))


def _table(change: Callable[[SlotTable], SlotTable]) -> Break:
    return _fields(tables=lambda tables: {name: change(table) for name, table in tables.items()})


def _entries(change: Callable[[torch.Tensor], torch.Tensor]) -> Break:
    return _table(lambda table: replace(table, entries=change(table.entries)))


def _write_slots(change: Callable[[torch.Tensor], torch.Tensor | None]) -> Break:
    return _table(lambda table: replace(table, write_slots=change(table.write_slots)))


def _late(patch: pytest.MonkeyPatch) -> None:
    """The block tables are those of the forward before."""
    last: dict[int, torch.Tensor] = {}

    def change(view: BatchView, batch: Any) -> BatchView:
        table = view.tables[REGION]
        now = table.entries.clone()
        old = last.get(table.entries.data_ptr(), now)
        last[table.entries.data_ptr()] = now
        return dataclasses.replace(view, tables={REGION: replace(table, entries=old)})

    _view(change)(patch)


def _stale(patch: pytest.MonkeyPatch) -> None:
    """The block tables are a copy from the first forward."""
    first: dict[int, torch.Tensor] = {}

    def change(view: BatchView, batch: Any) -> BatchView:
        table = view.tables[REGION]
        entries = first.setdefault(table.entries.data_ptr(), table.entries.clone())
        return dataclasses.replace(view, tables={REGION: replace(table, entries=entries)})

    _view(change)(patch)


def _padding_is_live(view: BatchView, batch: Any) -> BatchView:
    """Rows of padding count as requests with one new token."""
    padded = view.new_lens == 0
    return dataclasses.replace(view, new_lens=view.new_lens + padded, writers=view.writers.clamp(min=0))


def _guarded(make: Callable[[ToyGuard, Callable[..., Any]], Callable[[Any], Any]]) -> Break:
    """The wrapper around a forward."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(ToyGuard, "_guarded", make)

    return apply


def _bracket(before: bool, check: str, after: bool, end: bool) -> Break:
    """A bracket by hand. ``check``: "first", "last" (after the forward), "both" (check and record before it)."""

    def make(session: ToyGuard, forward: Callable[..., Any]) -> Callable[[Any], Any]:
        def guarded(batch: Any) -> Any:
            step = session.canary.step
            output = forward(batch) if check == "last" else None
            if before:
                step.before(session._batch.view(batch))
            if check == "both":
                step.after()
            if output is None:
                output = forward(batch)
            if after and check != "both":
                step.after()
            if end:
                step.end()
            return output

        return guarded

    return _guarded(make)


def _only_first_forward(session: ToyGuard, forward: Callable[..., Any]) -> Callable[[Any], Any]:
    done: list[int] = []

    def guarded(batch: Any) -> Any:
        if done:
            return forward(batch)
        done.append(1)
        return session.canary.step.run(lambda: forward(batch), lambda: session._batch.view(batch))

    return guarded


def _twice(session: ToyGuard, forward: Callable[..., Any]) -> Callable[[Any], Any]:
    """The forward runs twice."""

    def guarded(batch: Any) -> Any:
        forward(batch)
        return session.canary.step.run(lambda: forward(batch), lambda: session._batch.view(batch))

    return guarded


def _changes_output(session: ToyGuard, forward: Callable[..., Any]) -> Callable[[Any], Any]:
    def guarded(batch: Any) -> Any:
        output = session.canary.step.run(lambda: forward(batch), lambda: session._batch.view(batch))
        return (output + 1) % 100

    return guarded


def _swallows(session: ToyGuard, forward: Callable[..., Any]) -> Callable[[Any], Any]:
    """Every exception of Canary's is dropped."""

    def guarded(batch: Any) -> Any:
        outputs: list[Any] = []
        with contextlib.suppress(Exception):
            session.canary.step.run(lambda: outputs.append(forward(batch)), lambda: session._batch.view(batch))
        return outputs[0]

    return guarded


def _fills_padding(view: BatchView, batch: Any) -> BatchView:
    """The adapter puts zeros into the engine's own batch."""
    batch.token_ids[len(batch.token_ids) // 2 :] = 0
    return view


def _events(change: Callable[[ToyGuard, str], str | None]) -> Break:
    """Which event is told instead of each: its name, None for none."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        right = ToyGuard._tell

        def tell(self: ToyGuard, event: Any, pages: Any) -> None:
            name = change(self, event.__name__)
            if name is not None:
                right(self, getattr(self.canary.slots, name), pages)

        patch.setattr(ToyGuard, "_tell", tell)

    return apply


def _instead(**names: str | None) -> Break:
    return _events(lambda _, name: names.get(name, name))


def _unfollowed(name: str) -> Break:
    """The function of the engine is not hooked."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        follow = hooks.Patches.follow

        def left_out(self: hooks.Patches, owner: Any, function: str, told: Callable[..., None]) -> None:
            if function != name:
                follow(self, owner, function, told)

        patch.setattr(hooks.Patches, "follow", left_out)

    return apply


def _region_name(patch: pytest.MonkeyPatch) -> None:
    """Events name another region than the pool's."""
    patch.setattr(hooks, "REGION", "kv_cache")


def _no_pages(patch: pytest.MonkeyPatch) -> None:
    """Numbers of pages are told as numbers of slots."""

    def tell(self: ToyGuard, event: Any, pages: Any) -> None:
        event(REGION, torch.tensor(pages, dtype=torch.int64, device=self.canary.device))

    patch.setattr(ToyGuard, "_tell", tell)


def _copies(change: Callable[[int, int], tuple[int, int] | None]) -> Break:
    def apply(patch: pytest.MonkeyPatch) -> None:
        right = ToyGuard._copied

        def copied(self: ToyGuard, _: None, source: int, destination: int) -> None:
            told = change(source, destination)
            if told is not None:
                right(self, None, *told)

        patch.setattr(ToyGuard, "_copied", copied)

    return apply


def _before_each(act: Callable[[ToyGuard], None]) -> Break:
    def make(session: ToyGuard, forward: Callable[..., Any]) -> Callable[[Any], Any]:
        def guarded(batch: Any) -> Any:
            act(session)
            return session.canary.step.run(lambda: forward(batch), lambda: session._batch.view(batch))

        return guarded

    return _guarded(make)


def _doubled(name: str) -> Break:
    """One event is told twice."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        right = ToyGuard._tell

        def tell(self: ToyGuard, event: Any, pages: Any) -> None:
            for _ in range(1 + (event.__name__ == name)):
                right(self, event, pages)

        patch.setattr(ToyGuard, "_tell", tell)

    return apply


def _install(act: Callable[[ToyHooks, Any], None]) -> Break:
    return lambda patch: patch.setattr(ToyHooks, "install", act)


def _installs_again(patch: pytest.MonkeyPatch) -> None:
    """Nothing remembers that it is installed."""
    right = ToyHooks.install

    def install(self: ToyHooks, config: Any) -> None:
        right(ToyHooks() if self._patches.done else self, config)

    patch.setattr(ToyHooks, "install", install)


def _first_engine_only(patch: pytest.MonkeyPatch) -> None:
    right = ToyGuard.__init__
    seen: list[int] = []

    def init(self: ToyGuard, engine: Any, config: Any) -> None:
        seen.append(1)
        if len(seen) > 1:
            raise RuntimeError("there is a session already")
        right(self, engine, config)

    patch.setattr(ToyGuard, "__init__", init)


def _never_closes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ToyHooks, "uninstall", lambda self: self._patches.undo())


def _never_restores(patch: pytest.MonkeyPatch) -> None:
    def uninstall(self: ToyHooks) -> None:
        while self.guards:
            self.guards.pop().close()

    patch.setattr(ToyHooks, "uninstall", uninstall)


def _settings_ignored(patch: pytest.MonkeyPatch) -> None:
    right = ToyGuard.__init__
    patch.setattr(
        ToyGuard,
        "__init__",
        lambda self, engine, config: right(self, engine, config.model_copy(update={"mode": "off"})),
    )


def _uncovered(patch: pytest.MonkeyPatch) -> None:
    """One layer is left out, and the reason given is about another amount."""
    _sources(lambda sources: sources[:2])(patch)
    patch.setattr(ToyPool, "uncovered", lambda self: (Uncovered("layers.1", 64, "scratch"),))


def _all() -> Iterator[Mutation]:
    for name, apply in BROKEN.items():
        yield Mutation(name, apply)


BROKEN: dict[str, Break] = {
    # The pool
    "the last layer is missing": _sources(lambda s: [x for x in s if x.layer != 1]),
    "the first layer is missing": _sources(lambda s: [x for x in s if x.layer != 0]),
    "V is missing": _sources(lambda s: [x for x in s if x.half != "v"]),
    "K is missing": _sources(lambda s: [x for x in s if x.half != "k"]),
    "V of one layer is missing": _sources(lambda s: [x for x in s if x.name != "v.1"]),
    "half of the heads are missing": _each(chunk_bytes=lambda s: s.slot_bytes // 2, chunks=1),
    "the last value of each head is missing": _each(chunk_bytes=lambda s: s.slot_bytes - 4, chunks=1),
    "K and V are exchanged": _sources(lambda s: [replace(x, half="v" if x.half == "k" else "k") for x in s]),
    "K and V of one layer are exchanged": _sources(
        lambda s: [replace(x, half="v" if x.half == "k" else "k") if x.layer else x for x in s]
    ),
    "layers are reversed": _sources(lambda s: [replace(x, layer=1 - x.layer) for x in s]),
    "layers count from 1": _sources(lambda s: [replace(x, layer=x.layer + 1) for x in s]),
    "layer 0 is described twice, layer 1 never": _sources(
        lambda s: [replace(x, layer=layer) for layer in range(2) for x in s if x.layer == 0]
    ),
    "the pool is copied, not viewed": _sources(lambda s: [_cloned(x) for x in s]),
    "one layer is copied, not viewed": _sources(lambda s: [_cloned(x) if x.layer else x for x in s]),
    "the pool is that of an earlier engine": _pool_of_first_engine,
    "the pool's page size is half of what it is": _each(
        page_size=2, page_stride_bytes=lambda s: s.page_stride_bytes, present=None
    ),
    "heads-first is read as tokens-first": _sources(lambda s: [_heads_first(x) for x in s]),
    "the slot stride is one head too short": _each(slot_stride_bytes=lambda s: s.slot_stride_bytes // 2),
    "everything is one slot further": _regions(
        lambda r: replace(
            r,
            slots=r.slots - PAGE,
            sources=tuple(replace(s, offset_bytes=s.offset_bytes + s.slot_stride_bytes) for s in r.sources),
        )
    ),
    "the last pages are left out": _regions(lambda r: replace(r, slots=r.slots // 2)),
    "the null block is not known": _regions(lambda r: replace(r, null_slot=None, null_slots=1)),
    "the null block is taken for one slot": _regions(lambda r: replace(r, null_slots=1)),
    "the null block is looked for at the wrong place": _regions(lambda r: replace(r, null_slot=PAGE)),
    "float32 is taken for float16": _each(dtype=torch.float16),
    "what is left out is explained by too little": _uncovered,
    # The view
    "the view is always None": _view(lambda view, _: None),
    "the view is None for decodes": _view(lambda view, _: None if int(view.new_lens.max()) == 1 else view),
    "the view is None for prefills": _view(lambda view, _: view if int(view.new_lens.max()) == 1 else None),
    "the view has no tables": _fields(tables=lambda tables: {}),
    "the view is made when the forward has run": _guarded(
        lambda session, forward: (
            lambda batch: (
                forward(batch),
                session.canary.step.run(lambda: None, lambda: session._batch.view(batch)),
            )[0]
        )
    ),
    "prefix lengths are one too long": _fields(prefix_lens=lambda t: t + (t > 0)),
    "prefix lengths are one too short": _fields(prefix_lens=lambda t: (t - 1).clamp(min=0)),
    "prefix lengths are 0": _fields(prefix_lens=torch.zeros_like),
    "prefix lengths are the whole lengths": _view(
        lambda view, _: dataclasses.replace(view, prefix_lens=view.prefix_lens + view.new_lens)
    ),
    "new lengths are at most 1": _fields(new_lens=lambda t: t.clamp(max=1)),
    "new lengths are one too short": _fields(new_lens=lambda t: (t - 1).clamp(min=0)),
    "rows of padding count as requests": _view(_padding_is_live),
    "the table is one page further": _entries(lambda t: t + 1),
    "the table is one page less": _entries(lambda t: (t - 1).clamp(min=0)),
    "the table is shifted by one entry": _entries(lambda t: t.roll(1, 1)),
    "the table is a copy from the start": _stale,
    "the table is that of the forward before": _late,
    "the table's rows are taken in order": _table(lambda t: replace(t, rows=None)),
    "the table's page size is half of what it is": _table(lambda t: replace(t, page_size=PAGE // 2)),
    "the table's page size is twice what it is": _table(lambda t: replace(t, page_size=PAGE * 2)),
    "the table counts in slots": _table(lambda t: replace(t, page_size=1)),
    "there are no write slots": _write_slots(lambda t: None),
    "write slots are one further": _write_slots(lambda t: t + 1),
    "write slots are in reverse order": _write_slots(lambda t: t.flip(0)),
    "write slots are numbers of pages": _write_slots(lambda t: t // PAGE),
    "write slots are too few": _write_slots(lambda t: t[:1]),
    "there are no expected tokens": _fields(expected_tokens=lambda t: None),
    "expected tokens are shifted by one": _fields(expected_tokens=lambda t: t.roll(1, 1)),
    "expected tokens are unknown": _fields(expected_tokens=lambda t: torch.full_like(t, -1)),
    "expected tokens are in reverse order of rows": _fields(expected_tokens=lambda t: t.flip(0)),
    "token ids are shifted by one": _fields(token_ids=lambda t: t.roll(1, 0)),
    "positions are one further": _fields(positions=lambda t: t + 1),
    "writers are unknown": _fields(writers=lambda t: torch.full_like(t, -1)),
    "all requests are one writer": _fields(writers=torch.zeros_like),
    "writers are numbers of rows": _fields(writers=lambda t: torch.arange(len(t))),
    "writers are in reverse order": _fields(writers=lambda t: t.flip(0)),
    # The bracket
    "the check comes after the forward": _bracket(before=True, check="last", after=True, end=True),
    "the record comes before the forward": _bracket(before=True, check="both", after=True, end=True),
    "there is no step.after": _bracket(before=True, check="first", after=False, end=True),
    "there is no step.before": _bracket(before=False, check="first", after=True, end=True),
    "there is no step.end": _bracket(before=True, check="first", after=True, end=False),
    "only the first forward is guarded": _guarded(_only_first_forward),
    "the forward runs twice": _guarded(_twice),
    "the output is changed": _guarded(_changes_output),
    "findings are swallowed in raise mode": _guarded(_swallows),
    "the adapter writes to the engine's batch": _view(_fills_padding),
    "all slots are forgotten before each forward": _before_each(lambda s: s.canary.slots.forget(REGION, None)),
    "all slots are cleared before each forward": _before_each(lambda s: s.canary.slots.clear(REGION, None)),
    # Events
    "no events are told": _instead(alloc=None, free=None, park=None, share=None, evict=None),
    "alloc is not told": _instead(alloc=None),
    "free is not told": _instead(free=None),
    "park is not told": _instead(park=None),
    "share is not told": _instead(share=None),
    "evict is not told": _instead(evict=None),
    "park is told as free": _instead(park="free"),
    "evict is told as free": _instead(evict="free"),
    "share is told as alloc": _instead(share="alloc"),
    "free is told as park": _instead(free="park"),
    "alloc and free are exchanged": _instead(alloc="free", free="alloc"),
    "free is told twice": _doubled("free"),
    "alloc is told twice": _doubled("alloc"),
    "events name another region": _region_name,
    "events count pages as slots": _no_pages,
    "a fork's copy is not told": _copies(lambda source, destination: None),
    "a fork's copy is told the wrong way round": _copies(lambda source, destination: (destination, source)),
    "a change of the weights is not told": _unfollowed("update_weights"),
    # The installation
    "canary_install does nothing": _install(lambda self, config: None),
    "canary_install twice hooks twice": _installs_again,
    "canary_uninstall leaves the hooks": _never_restores,
    "canary_uninstall closes no Canary": _never_closes,
    "only the first engine is guarded": _first_engine_only,
    "the settings are not handed on": _settings_ignored,
}
"""Every bug by its name, in the order of the table in the docs."""

MUTATIONS = tuple(_all())
