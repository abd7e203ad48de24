"""Ways to change what the toy engine's plugin says and does."""

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import replace
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


def regions(change: Callable[[Region], Region]) -> Break:
    """The adapter's region, changed."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        right = ToyPool.regions
        patch.setattr(ToyPool, "regions", lambda pool: [change(region) for region in right(pool)])

    return apply


def sources(change: Callable[[list[KVSource]], list[KVSource]]) -> Break:
    """The sources of the region, changed."""

    return regions(lambda region: replace(region, sources=tuple(change(list(region.sources)))))


def each_source(**fields: Any) -> Break:
    """Fields of every source; a function gets the source."""
    return sources(
        lambda sources: [replace(s, **{k: v(s) if callable(v) else v for k, v in fields.items()}) for s in sources]
    )


def cloned(source: KVSource) -> KVSource:
    """The source, with a copy of its tensor."""

    return replace(source, tensor=source.tensor.clone())


def heads_first(source: KVSource) -> KVSource:
    """As if a page were [heads, tokens, dim]."""
    head = source.slot_bytes // 2
    return replace(source, chunks=2, chunk_bytes=head, slot_stride_bytes=head, chunk_stride_bytes=head * PAGE)


first_pool: list[Any] = []


def pool_of_first_engine(patch: pytest.MonkeyPatch) -> None:
    """A pool that is kept from an earlier engine."""
    right = ToyPool.__init__
    first_pool.clear()

    def init(self: ToyPool, pool: Any) -> None:
        first_pool.append(pool)
        right(self, first_pool[0])

    patch.setattr(ToyPool, "__init__", init)


def view(change: Callable[[BatchView, Any], BatchView | None]) -> Break:
    """The adapter's view, changed; the function gets the batch as well."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        right = ToyBatch.view
        patch.setattr(ToyBatch, "view", lambda self, batch: change(right(self, batch), batch))

    return apply


def view_fields(**changes: Callable[[Any], Any]) -> Break:
    """Fields of the view, each by a function of what is right."""
    return view(lambda view, _: dataclasses.replace(view, **{n: c(getattr(view, n)) for n, c in changes.items()}))


def tables(change: Callable[[SlotTable], SlotTable]) -> Break:
    """Every table of the view, changed."""

    return view_fields(tables=lambda tables: {name: change(table) for name, table in tables.items()})


def entries(change: Callable[[torch.Tensor], torch.Tensor]) -> Break:
    """The entries of every table, changed."""

    return tables(lambda table: replace(table, entries=change(table.entries)))


def write_slots(change: Callable[[torch.Tensor], torch.Tensor | None]) -> Break:
    """The write slots of every table, changed."""

    return tables(lambda table: replace(table, write_slots=change(table.write_slots)))


def late_tables(patch: pytest.MonkeyPatch) -> None:
    """The block tables are those of the forward before."""
    last: dict[int, torch.Tensor] = {}

    def change(view: BatchView, batch: Any) -> BatchView:
        table = view.tables[REGION]
        now = table.entries.clone()
        old = last.get(table.entries.data_ptr(), now)
        last[table.entries.data_ptr()] = now
        return dataclasses.replace(view, tables={REGION: replace(table, entries=old)})

    view(change)(patch)


def stale_tables(patch: pytest.MonkeyPatch) -> None:
    """The block tables are a copy from the first forward."""
    first: dict[int, torch.Tensor] = {}

    def change(view: BatchView, batch: Any) -> BatchView:
        table = view.tables[REGION]
        entries = first.setdefault(table.entries.data_ptr(), table.entries.clone())
        return dataclasses.replace(view, tables={REGION: replace(table, entries=entries)})

    view(change)(patch)


def padding_is_live(view: BatchView, batch: Any) -> BatchView:
    """Rows of padding count as requests with one new token."""
    padded = view.new_lens == 0
    return dataclasses.replace(view, new_lens=view.new_lens + padded, writers=view.writers.clamp(min=0))


def guarded(make: Callable[[ToyGuard, Callable[..., Any]], Callable[[Any], Any]]) -> Break:
    """The wrapper around a forward."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(ToyGuard, "_guarded", make)

    return apply


def bracket(before: bool, check: str, after: bool, end: bool) -> Break:
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

    return guarded(make)


def only_first_forward(session: ToyGuard, forward: Callable[..., Any]) -> Callable[[Any], Any]:
    """The first forward is guarded, and no other."""

    done: list[int] = []

    def guarded(batch: Any) -> Any:
        if done:
            return forward(batch)
        done.append(1)
        return session.canary.step.run(lambda: forward(batch), lambda: session._batch.view(batch))

    return guarded


def forward_twice(session: ToyGuard, forward: Callable[..., Any]) -> Callable[[Any], Any]:
    """The forward runs twice."""

    def guarded(batch: Any) -> Any:
        forward(batch)
        return session.canary.step.run(lambda: forward(batch), lambda: session._batch.view(batch))

    return guarded


def changes_output(session: ToyGuard, forward: Callable[..., Any]) -> Callable[[Any], Any]:
    """Another token comes out."""

    def guarded(batch: Any) -> Any:
        output = session.canary.step.run(lambda: forward(batch), lambda: session._batch.view(batch))
        return (output + 1) % 100

    return guarded


def swallows(session: ToyGuard, forward: Callable[..., Any]) -> Callable[[Any], Any]:
    """Every exception of Canary's is dropped."""

    def guarded(batch: Any) -> Any:
        outputs: list[Any] = []
        with contextlib.suppress(Exception):
            session.canary.step.run(lambda: outputs.append(forward(batch)), lambda: session._batch.view(batch))
        return outputs[0]

    return guarded


def fills_padding(view: BatchView, batch: Any) -> BatchView:
    """The adapter puts zeros into the engine's own batch."""
    batch.token_ids[len(batch.token_ids) // 2 :] = 0
    return view


def events(change: Callable[[ToyGuard, str], str | None]) -> Break:
    """Which event is told instead of each: its name, None for none."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        right = ToyGuard._tell

        def tell(self: ToyGuard, event: Any, pages: Any) -> None:
            name = change(self, event.__name__)
            if name is not None:
                right(self, getattr(self.canary.slots, name), pages)

        patch.setattr(ToyGuard, "_tell", tell)

    return apply


def instead(**names: str | None) -> Break:
    """By the name of an event: the one told in its place, None for none."""

    return events(lambda _, name: names.get(name, name))


def region_name(patch: pytest.MonkeyPatch) -> None:
    """Events name another region than the pool's."""
    patch.setattr(hooks, "REGION", "kv_cache")


def no_pages(patch: pytest.MonkeyPatch) -> None:
    """Numbers of pages are told as numbers of slots."""

    def tell(self: ToyGuard, event: Any, pages: Any) -> None:
        event(REGION, torch.tensor(pages, dtype=torch.int64, device=self.canary.device))

    patch.setattr(ToyGuard, "_tell", tell)


def copies(change: Callable[[int, int], tuple[int, int] | None]) -> Break:
    """What is told of a copied page: another source and destination, or None for nothing."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        right = ToyGuard._copied

        def copied(self: ToyGuard, _: None, source: int, destination: int) -> None:
            told = change(source, destination)
            if told is not None:
                right(self, None, *told)

        patch.setattr(ToyGuard, "_copied", copied)

    return apply


def before_each(act: Callable[[ToyGuard], None]) -> Break:
    """``act`` runs before each forward."""

    def make(session: ToyGuard, forward: Callable[..., Any]) -> Callable[[Any], Any]:
        def guarded(batch: Any) -> Any:
            act(session)
            return session.canary.step.run(lambda: forward(batch), lambda: session._batch.view(batch))

        return guarded

    return guarded(make)


def doubled(name: str) -> Break:
    """One event is told twice."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        right = ToyGuard._tell

        def tell(self: ToyGuard, event: Any, pages: Any) -> None:
            for _ in range(1 + (event.__name__ == name)):
                right(self, event, pages)

        patch.setattr(ToyGuard, "_tell", tell)

    return apply


def install(act: Callable[[ToyHooks, Any], None]) -> Break:
    """The installation."""

    return lambda patch: patch.setattr(ToyHooks, "install", act)


def installs_again(patch: pytest.MonkeyPatch) -> None:
    """Nothing remembers that it is installed."""
    right = ToyHooks.install

    def install(self: ToyHooks, config: Any) -> None:
        right(ToyHooks() if self._patches.done else self, config)

    patch.setattr(ToyHooks, "install", install)


def first_engine_only(patch: pytest.MonkeyPatch) -> None:
    """A second engine fails to be guarded."""

    right = ToyGuard.__init__
    seen: list[int] = []

    def init(self: ToyGuard, engine: Any, config: Any) -> None:
        seen.append(1)
        if len(seen) > 1:
            raise RuntimeError("there is a session already")
        right(self, engine, config)

    patch.setattr(ToyGuard, "__init__", init)


def never_closes(patch: pytest.MonkeyPatch) -> None:
    """Uninstalling leaves the Canaries open."""

    patch.setattr(ToyHooks, "uninstall", lambda self: self._patches.undo())


def never_restores(patch: pytest.MonkeyPatch) -> None:
    """Uninstalling leaves the engine's functions patched."""

    def uninstall(self: ToyHooks) -> None:
        while self.guards:
            self.guards.pop().close()

    patch.setattr(ToyHooks, "uninstall", uninstall)


def settings_ignored(patch: pytest.MonkeyPatch) -> None:
    """Whatever is configured, Canary is off."""

    right = ToyGuard.__init__
    patch.setattr(
        ToyGuard,
        "__init__",
        lambda self, engine, config: right(self, engine, config.model_copy(update={"mode": "off"})),
    )


def uncovered_too_little(patch: pytest.MonkeyPatch) -> None:
    """One layer is left out, and the reason given is about another amount."""
    sources(lambda sources: sources[:2])(patch)
    patch.setattr(ToyPool, "uncovered", lambda self: (Uncovered("layers.1", 64, "scratch"),))
