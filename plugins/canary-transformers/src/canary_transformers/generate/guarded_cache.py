"""`GuardedCache`: one cache of `generate()` under guard, from its first forward to its end."""

import contextlib
from collections import Counter as Tally
from collections.abc import Iterator, Sequence
from typing import Any

import pluggy
import torch
from torch import Tensor

from canary_core import plugins
from canary_core.batch import BatchView, SlotTable
from canary_core.canary import Canary
from canary_core.config import CanaryConfig
from canary_core.errors import ViolationError
from canary_core.events import Event, Level
from canary_core.writers import Writers
from canary_transformers.filters import MovedSlots
from canary_transformers.generate import caches
from canary_transformers.generate.caches import LayerView
from canary_transformers.generate.forward import UNKNOWN, ModelCall
from canary_transformers.generate.groups import Group, capacity_for, disagreeing, groups_of
from canary_transformers.generate.moves import carry, excuse_pads, expect_zeros, move


class GuardedCache:
    """Follows one `Cache`. `before` and `after` bracket a forward; `reordered`, `cropped` and `cleared` follow what its
    methods do in between.

    In log mode nothing of ours raises into the engine: an exception switches this guard off with a ``disabled`` event.
    `before` and `after` raise `ViolationError` in raise mode. Where layers do not hold what those methods have left
    them with, slots that attention reads all the same are findings (UNWRITTEN), and an event names the layers.

    ``pad``: the token whose embedding is zero, if there is one.
    """

    def __init__(self, name: str, config: CanaryConfig, hooks: pluggy.PluginManager, pad: int | None = None) -> None:
        self.name = name
        self._config = config
        self._pad = pad
        self.hooks = hooks
        hooks.register(MovedSlots())
        self._writers = Writers()
        self._canary: Canary | None = None
        self._ended: Tally[str] = Tally()
        self._over = config.mode == "off"
        self._groups: list[Group] = []
        self._writer_ids: list[int] = []
        self._end = 0
        self._unknown_end = 0
        self._was_empty = True
        self._pending: dict[str, int] | None = None

    @property
    def canary(self) -> Canary | None:
        """The present one: None until the first forward has ended, another one whenever the cache outgrows it."""
        return self._canary

    def stats(self) -> dict[str, int]:
        """`Canary.stats`, over all that this cache had."""
        total = Tally(self._ended)
        if self._canary is not None:
            total.update(self._canary.stats())
        return dict(total)

    def before(self, cache: Any, forward: ModelCall) -> None:
        """Checks what the forward will read."""
        with self._ours("before the forward"):
            self._pending = None
            canary = self._live()
            if canary is None and self._over:
                return
            views = caches.look(cache)
            if canary is None:
                self._was_empty = all(view.end == 0 for view in views)
            elif self._as_left(canary, views):
                self._check(views, forward)

    def after(self, cache: Any, forward: ModelCall) -> None:
        """Records what the forward wrote, then reports."""
        with self._ours("after the forward"):
            canary = self._live()
            if canary is not None and self._pending is not None:
                self._record(cache, canary, forward)
            elif canary is None and not self._over:
                self._attach(cache, forward)
            canary = self._live()
            if canary is not None:
                canary.step.end()

    def reordered(self, cache: Any, rows: Tensor) -> None:
        """The cache's row ``i`` is now what its row ``rows[i]`` was; there may be more rows than before, or fewer."""
        with self._ours("rows"):
            canary = self._live()
            if canary is None or self._end == 0:
                return
            device = self._device(canary)
            rows = rows.to(device, torch.int64).flatten()
            if len(rows) != len(self._writer_ids):
                self._replace(caches.look(cache), canary, rows)
            else:
                every = torch.arange(len(rows), device=device)
                for group in self._groups:
                    held = range(group.held)
                    canary.slots.copy(group.name, group.slots(held, rows), group.slots(held, every))
            self._new_writers(len(rows))

    def repeated(self, cache: Any, times: int) -> None:
        """Each row of the cache is there ``times`` times now, one after the other."""
        self.reordered(cache, torch.arange(len(self._writer_ids)).repeat_interleave(int(times)))

    def cropped(self, tokens_to_remove: int) -> None:
        """`Cache.crop`: that many tokens were removed, as a negative number; a positive one is how many are left."""
        with self._ours("crop"):
            canary = self._live()
            if canary is None:
                return
            end = int(tokens_to_remove) if tokens_to_remove > 0 else self._end + int(tokens_to_remove)
            removed = max(self._end - max(end, 0), 0)
            self._end -= removed
            self._unknown_end = min(self._unknown_end, self._end)
            for group in self._groups:
                move(canary, group, self._end, group.keeping.held_after_crop(group.held, removed))

    def cleared(self) -> None:
        """Nothing is left; tensors that stay are zeroed."""
        with self._ours("reset"):
            canary = self._live()
            if canary is None:
                return
            self._end = self._unknown_end = 0
            for group in self._groups:
                move(canary, group, 0, 0)
                if group.keeping.static_tokens is not None:
                    expect_zeros(group, canary.states[group.name], range(group.capacity))
            self._new_writers(len(self._writer_ids))

    def drain(self) -> None:
        """Reports everything found so far; waits for the device. Raises `ViolationError` in raise mode."""
        with self._ours("drain"):
            canary = self._live()
            if canary is not None:
                canary.drain()

    def close(self) -> None:
        """The cache is gone, or the guard. Raises `ViolationError` in raise mode; again: does nothing."""
        with self._ours("close"):
            self._over = True
            self._retire()

    def _live(self) -> Canary | None:
        return self._canary if self._canary is not None and self._canary.enabled else None

    def _check(self, views: Sequence[LayerView], forward: ModelCall) -> None:
        recording = {view.layer: view.recording for view in views}
        held = {
            g.name: g.keeping.held_after(g.held, forward.new, recording.get(g.layers[0], False)) for g in self._groups
        }
        canary = self._live()
        if canary is None:
            return
        if forward.rows != len(self._writer_ids):
            self._release(f"{len(self._writer_ids)} rows were given {forward.rows} rows of tokens")
            return
        if any(held[g.name] > g.capacity for g in self._groups if g.keeping.static_tokens is None):
            most = {g.name: max(held[g.name], g.capacity) for g in self._groups}
            canary = self._replace(views, canary, None, most)
        else:
            self._rebind(views, canary)
        end = self._end + forward.new
        device = self._device(canary)
        tables = {
            g.name: g.table(self._end, device, None if end == held[g.name] else end - held[g.name], forward.new)
            for g in self._groups
        }
        self._pending = held
        canary.step.before(self._batch(self._end, forward, tables, device))

    def _record(self, cache: Any, canary: Canary, forward: ModelCall) -> None:
        views = caches.look(cache)
        if forward.new and {view.end for view in views} == {self._end}:
            return  # a model that was told not to use its cache
        if {view.layer for view in views} != {layer for group in self._groups for layer in group.layers}:
            # Layers that other forwards of this model leave alone.
            self._retire()
            self._was_empty = False
            self._attach(cache, forward)
            return
        before, self._end = self._end, self._end + forward.new
        for group in self._groups:
            move(canary, group, self._end, (self._pending or {})[group.name])
        self._rebind(views, canary)
        device = self._device(canary)
        tables = {group.name: group.table(self._end, device) for group in self._groups}
        self._excuse_pads(canary, forward.tokens)
        canary.step.after(self._batch(before, forward, tables, device))
        if forward.tokens is None:
            self._unknown_end = self._end

    def _attach(self, cache: Any, forward: ModelCall) -> None:
        """Begins with the bytes that are there: what this forward wrote, and, unjudged, what was there before."""
        views = caches.look(cache, wait=True)
        end = views[0].end if views else None
        left_out = caches.uncovered(cache)
        if not views or end is None:
            self._over = bool(left_out)
            if left_out:
                listed = [{"name": u.name, "bytes": u.size_bytes, "reason": u.reason} for u in left_out]
                self._tell("coverage", "warning", {"cache": self.name, "coverage_ratio": 0.0, "uncovered": listed})
            return
        rows = views[0].keys.shape[0]
        if rows != forward.rows or not 0 < forward.new <= end or disagreeing(views, groups_of(views, end), end):
            self._release(f"{rows} rows of {end} tokens do not fit the forward's {forward.rows} rows of {forward.new}")
            return
        self._groups = groups_of(views, end)
        regions = [group.region(views) for group in self._groups]
        canary = Canary(regions, self._config, hooks=self.hooks, writers=self._writers, uncovered=left_out)
        self._canary, self._end = canary, end
        self._new_writers(rows)
        device = self._device(canary)
        tokens = torch.full((rows, end), UNKNOWN, dtype=torch.int64, device=device)
        for known in (forward.tokens, forward.history_to(end)):
            if known is not None and known.shape[1]:
                tokens[:, end - known.shape[1] :] = known.to(device)
        if end > forward.new:
            self._tell("adopted", "info", {"cache": self.name, "tokens": rows * (end - forward.new)})
        for group in self._groups:
            written = range(group.held)
            if group.keeping.static_tokens is not None and self._was_empty:
                expect_zeros(group, canary.states[group.name], written)
            elif group.held:
                canary.states[group.name].fingerprints[group.slots(written, torch.arange(rows, device=device))] = 0
        history = forward.history_to(end)
        known_tokens = forward.new if history is None else max(history.shape[1], forward.new)
        self._unknown_end = end if forward.tokens is None else end - known_tokens
        tables = {g.name: g.table(0, device, g.first, end) for g in self._groups}
        batch = self._batch(0, ModelCall(rows, end, tokens, None), tables, device)
        self._excuse_pads(canary, tokens)
        canary.step.before(batch)
        canary.step.after(batch)

    def _excuse_pads(self, canary: Canary, tokens: Tensor | None) -> None:
        if tokens is None or self._pad is None or self._config.bytes == "off":
            return
        pads = tokens.to(self._device(canary)) == self._pad
        for group in self._groups:
            excuse_pads(group, canary.states[group.name], pads)

    def _replace(
        self, views: Sequence[LayerView], old: Canary, rows: Tensor | None, held: dict[str, int] | None = None
    ) -> Canary:
        """Another Canary with room for ``held`` tokens a row, and rows ``rows`` of the old one, records and all."""
        old_groups = self._groups
        device = self._device(old)
        if rows is None:
            rows = torch.arange(len(self._writer_ids), device=device)
        self._groups = []
        for group in old_groups:
            needed = (held or {}).get(group.name, group.capacity)
            capacity = group.capacity if needed <= group.capacity else capacity_for(needed)
            self._groups.append(
                Group(group.name, group.keeping, group.layers, len(rows), capacity, group.first, group.held)
            )
        regions = [group.region(views) for group in self._groups]
        canary = Canary(regions, self._config, hooks=self.hooks, writers=self._writers, uncovered=old.uncovered)
        for before, group in zip(old_groups, self._groups, strict=True):
            carry((before, old.states[before.name]), (group, canary.states[group.name]), rows)
        self._retire()
        self._canary = canary
        return canary

    def _release(self, reason: str) -> None:
        """A cache that can't be followed any more."""
        self._over = True
        self._tell("cache_released", "error", {"cache": self.name, "reason": reason})
        self._retire()

    def _retire(self) -> None:
        canary, self._canary = self._canary, None
        if canary is not None:
            try:
                canary.close()
            finally:
                self._ended.update(canary.stats())

    def _as_left(self, canary: Canary, views: Sequence[LayerView]) -> bool:
        """Whether all layers hold what they should. If not, that is told, and what attention will read is checked."""
        off = disagreeing(views, self._groups, self._end)
        if not off:
            return True
        ends = {view.end or 0 for view in views if view.end is not None}
        together = len(ends) == 1
        fields: dict[str, object] = {"cache": self.name, "expected_tokens": self._end, "layer_tokens": off}
        if together and max(ends) < self._end:
            fields["reason"] = "every layer was changed by something else than the methods of Cache"
            self._tell("cache_changed", "warning", fields)
        else:
            fields["reason"] = "layers hold more tokens than they should, or not the same ones"
            self._tell("cache_layers_disagree", "error", fields)
            self._check_disagreeing(canary, views, off)
        self._retire()
        self._was_empty = False
        self._over = not together
        return False

    def _check_disagreeing(self, canary: Canary, views: Sequence[LayerView], off: dict[int, int]) -> None:
        """Finds what attention reads beyond what all layers hold."""
        device = self._device(canary)
        every = torch.arange(len(self._writer_ids), device=device)
        lowest, highest = min(off.values()), max(off.values())
        tables = {}
        groups = [g for g in self._groups if any(layer in off for layer in g.layers)]
        # A layer that lost slots makes the group's slots unreadable, one that kept too many is read beyond its records.
        end = min(max(highest, self._end), *(g.first + g.capacity for g in groups))
        for group in groups:
            gone = range(max(lowest - group.first, 0), max(group.held, 0))
            if gone:
                canary.slots.clear(group.name, group.slots(gone, every))
            tables[group.name] = group.table(end, device)
        nothing = ModelCall(len(self._writer_ids), 0, None, None)
        canary.step.before(self._batch(end, nothing, tables, device))
        canary.drain()

    def _rebind(self, views: Sequence[LayerView], canary: Canary) -> None:
        for group in self._groups:
            mine = [view for view in views if view.layer in group.layers]
            bound = [source.tensor.data_ptr() for source in canary.states[group.name].sources]
            in_place = group.keeping.static_tokens is not None
            if in_place and bound == [t.data_ptr() for view in mine for t in (view.keys, view.values)]:
                continue
            if len(mine) == len(group.layers):
                canary.slots.rebind(group.name, group.sources(mine))

    def _batch(self, prefix: int, forward: ModelCall, tables: dict[str, SlotTable], device: torch.device) -> BatchView:
        rows = forward.rows
        return BatchView(
            prefix_lens=torch.full((rows,), prefix, dtype=torch.int64, device=device),
            new_lens=torch.full((rows,), forward.new, dtype=torch.int64, device=device),
            token_ids=forward.token_ids(device),
            writers=torch.tensor(self._writer_ids, dtype=torch.int64, device=device),
            tables=tables,
            expected_tokens=forward.expected_tokens(prefix, self._unknown_end, device),
        )

    def _new_writers(self, rows: int) -> None:
        """A row that was reordered has another history than its name had."""
        names = [f"{self.name} row {row}" for row in range(rows)]
        for name in names:
            self._writers.forget(name)
        self._writer_ids = [self._writers.id(name) for name in names]

    def _device(self, canary: Canary) -> torch.device:
        return next(iter(canary.regions.values())).device

    def _tell(self, name: str, level: Level, fields: dict[str, object]) -> None:
        plugins.emit(Event(name, level, fields), self.hooks)

    @contextlib.contextmanager
    def _ours(self, where: str) -> Iterator[None]:
        """Code of ours within a call of the engine: no gradients, and its exceptions are ours to handle."""
        try:
            # Records are updated in place for longer than the engine's own inference mode may last.
            with torch.inference_mode(False), torch.no_grad():
                yield
        except ViolationError:
            raise
        except Exception as error:
            self._over = True
            if self._canary is not None:
                self._canary.fail(f"canary_transformers: {where}", error)
            elif self._config.mode == "raise":
                raise
            else:
                self._tell("disabled", "error", {"where": f"canary_transformers: {where}", "error": repr(error)})
