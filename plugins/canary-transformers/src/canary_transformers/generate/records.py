"""`CacheRecords`: one `Canary` on a cache of `generate()`, and the cache's content as known to Canary."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pluggy
import torch
from torch import Tensor

from canary_adapters import upload
from canary_core import BatchView, Canary, Overlap, SlotTable
from canary_transformers.generate.caches import LayerView
from canary_transformers.generate.forward import UNKNOWN, ModelCall
from canary_transformers.generate.groups import Group
from canary_transformers.generate.lengths import RowLengths


class CacheRecords:
    """Knows the sequence and token of each slot of ``canary``, and follows the engine's moves of rows or tokens. Every
    row of the cache holds ``end`` tokens, some of them kept by each of ``groups``.

    ``name``: the cache's, for findings. ``pad``: the token with a zero embedding, if there is one.

    No method waits for the device, unless noted. None handles errors: see `GuardedCache`.
    """

    def __init__(self, name: str, canary: Canary, groups: Sequence[Group], end: int, pad: int | None) -> None:
        self.canary = canary
        self.groups = tuple(groups)
        self.end = end
        """The position after the last token."""
        self.checked: Mapping[str, int] | None = None
        """During a forward after `check`: each group's number of tokens afterwards."""
        self._name = name
        self._pad = None if canary.config.bytes == "off" else pad
        self._every = torch.arange(groups[0].rows, device=canary.device)
        self._lengths = RowLengths(groups[0].rows, canary.device)
        self._unknown_end = 0
        self._writers = self._every
        self._view: BatchView | None = None
        self._issued_first = False
        self._told = self._warm = False

    @property
    def rows(self) -> int:
        """Sequences in the cache."""
        return len(self._every)

    @property
    def compares_reads(self) -> bool:
        """Whether bytes are compared before a forward reads them."""
        return any(self.canary.compares_reads(group.name) for group in self.groups)

    @property
    def audited(self) -> bool:
        """Whether the audit has to know where the tensors are."""
        return self.canary.audit.follows_sources

    @property
    def layers(self) -> set[int]:
        """All guarded layers."""
        return {layer for group in self.groups for layer in group.layers}

    def held_after(self, views: Sequence[LayerView], new: int) -> dict[str, int]:
        """How many tokens of a row each group will hold after a forward of ``new`` more."""
        recording = {view.layer: view.recording for view in views}
        return {g.name: g.keeping.held_after(g.held, new, recording.get(g.layers[0], False)) for g in self.groups}

    def have_room(self, held: Mapping[str, int]) -> bool:
        """Whether every growing group has slots for so many tokens of a row."""
        return all(held[g.name] <= g.capacity for g in self.groups if g.keeping.static_tokens is None)

    def rebuilt(
        self,
        views: Sequence[LayerView],
        hooks: pluggy.PluginManager,
        rows: Tensor | None = None,
        held: Mapping[str, int] | None = None,
    ) -> "CacheRecords":
        """The same on another Canary, whose row ``i`` was row ``rows[i]`` here (None: row ``i``), with room for
        ``held`` tokens of a row by group. The caller has to close this Canary."""
        old = self.canary
        every = self._every if rows is None else rows
        groups = [group.resized(len(every), (held or {}).get(group.name, 0)) for group in self.groups]
        regions = [group.region(views) for group in groups]
        canary = Canary(
            regions, old.config, hooks=hooks, writers=old.writers, uncovered=old.uncovered, witness=old.witness
        )
        new = CacheRecords(self._name, canary, groups, self.end, self._pad)
        new._unknown_end = self._unknown_end
        new._writers = self._writers
        new._told = self._told
        for before, group in zip(self.groups, groups, strict=True):
            kept = range(group.held)
            source, destination = before.slots(kept, every), group.slots(kept, new._every)
            canary.slots.carry_over(old.slots, group.name, source, destination)
        if rows is not None:
            new._rename_rows()
        return new

    def rebind(self, views: Sequence[LayerView]) -> None:
        """Moves the layers to the tensors of ``views``."""
        for group in self.groups:
            places = group.places_of(views)
            if places != group.places and len(places) == 2 * len(group.layers):
                self.canary.slots.rebind(group.name, group.sources(views))

    def rebind_alike(self, tensors: Sequence[Tensor]) -> bool:
        """As `rebind`, for a cache of one group whose layers' tensors, K and V in turn, are ``tensors`` now. Returns
        whether they are alike enough; if not, nothing has changed."""
        (group,) = self.groups
        places = group.places_alike(tensors)
        if places is None or not self.canary.slots.rebind_alike(group.name, tensors, places):
            return False
        # The next look at all layers finds other places, and keeps no tensor that the cache has given up.
        group.bound, group.places = (), ()
        return True

    def adopt(self, forward: ModelCall, was_empty: bool) -> None:
        """After the first forward under guard: records the whole cache, so that writes of ``forward`` are judged from
        now on. ``was_empty``: the cache was empty before, so that static tensors were zero."""
        device, end = self.canary.device, self.end
        self._rename_rows()
        tokens = torch.full((self.rows, end), UNKNOWN, dtype=torch.int64, device=device)
        history = forward.history_to(end)
        self._told = history is not None
        for known in (forward.tokens, history):
            if known is not None and known.shape[1]:
                tokens[:, end - known.shape[1] :] = known.to(device)
        known_tokens = forward.new if history is None else max(history.shape[1], forward.new)
        self._unknown_end = end if forward.tokens is None else end - known_tokens
        for group in self.groups:
            slots = group.slots(range(group.held), self._every)
            if group.keeping.static_tokens is not None and was_empty:
                self.canary.slots.expect_zeros(group.name, slots)
            else:
                self.canary.slots.forget_bytes(group.name, slots)
        # As decodes have it, so that the kernels are theirs: no list of places where none has moved, and own tokens.
        tables = {g.name: g.table(0, device, g.first or None, end) for g in self.groups}
        batch = self._batch(0, ModelCall(self.rows, end, tokens, tokens if self._told else None), tables)
        self._excuse_pads(tokens)
        self.canary.step.before(batch)
        self.canary.step.after(batch)
        self._drop_passed(end, {group.name: group.held for group in self.groups})

    def issues_first(self) -> bool:
        """Before a forward with writes in place: whether to issue it before `check`, which then runs beside."""
        self._issued_first = self.canary.step.issues_first(Overlap.ALL)
        return self._issued_first

    def check(self, forward: ModelCall, held: Mapping[str, int]) -> None:
        """Before a forward that leaves ``held`` tokens in the groups, or after issuing it if `issues_first` said so:
        checks its reads. `record` or `abandon` must follow."""
        if not self._issued_first:
            self._check(forward, held, Overlap.NONE)
            return
        with self.canary.step.beside():
            self._check(forward, held, Overlap.ALL)

    def _check(self, forward: ModelCall, held: Mapping[str, int], overlap: Overlap) -> None:
        end = self.end + forward.new
        tables = {}
        for group in self.groups:
            first = end - held[group.name]
            tables[group.name] = group.table(self.end, self.canary.device, first or None, forward.new)
        self.checked = held
        self._view = self._batch(self.end, forward, tables)
        self.canary.step.before(self._view, overlap)
        self.let_go_growing()

    def record(self, views: Sequence[LayerView] | None, forward: ModelCall) -> None:
        """After a forward: records its writes to the tensors of ``views``; None: to the known ones."""
        held, self.checked, self._issued_first = self.checked or {}, None, False
        view, self._view = self._view, None
        if view is None:
            raise RuntimeError("CacheRecords.record needs a forward that was checked")
        self.end += forward.new
        for group in self.groups:
            self._move(group, held[group.name])
        if views is not None:
            self.rebind(views)
        if forward.tokens is not None:
            self._excuse_pads(forward.tokens)
        if any(table.write_slots is not None for table in view.tables.values()):
            # Rows have moved, so the new tokens are where this table says.
            tables = {group.name: group.table(self.end, self.canary.device) for group in self.groups}
            view = replace(view, tables=tables)
        self.canary.step.after(view)
        self._drop_passed(forward.new, held)
        if forward.tokens is None and forward.new:
            self._unknown_end = self.end
        if not self._warm:
            # The first token is out by now, and what it needed is compiled.
            self._warm = True
            self.canary.warm_up(self._decode, self.rows, alone=True)

    def abandon(self, views: Sequence[LayerView] = ()) -> None:
        """The forward has failed, or left the cache alone, with ``views`` as its layers' present state."""
        self.rebind(views)
        if self.checked is not None or self._issued_first:
            self.checked, self._view, self._issued_first = None, None, False
            self.canary.step.abandon()

    def check_beyond(self, lengths: Mapping[int, int]) -> None:
        """Finds coming reads of tokens missing in a layer. ``lengths``: of the sequences in layers with the wrong
        tokens. Waits for the device. Raises `ViolationError` in raise mode."""
        lowest, highest = min(lengths.values()), max(lengths.values())
        groups = [g for g in self.groups if any(layer in lengths for layer in g.layers)]
        # A layer that lost slots makes the group's slots unreadable, one that kept too many is read beyond its records.
        end = min(max(highest, self.end), *(g.first + g.capacity for g in groups))
        for group in groups:
            gone = range(max(lowest - group.first, 0), max(group.held, 0))
            if gone:
                self.canary.slots.clear(group.name, group.slots(gone, self._every))
        tables = {group.name: group.table(end, self.canary.device) for group in groups}
        self.canary.step.before(self._batch(end, ModelCall(self.rows, 0, None, None), tables))
        self.canary.step.abandon()
        self.canary.drain()

    def compare(self, views: Sequence[LayerView]) -> None:
        """Compares the bytes of all that the cache holds, in the tensors of ``views``; between forwards."""
        self.rebind(views)
        for group in self.groups:
            if group.held > 0:
                self.canary.count("hit_slots", group.held * self.rows)
                self.canary.slots.check(group.name, group.slots(range(group.held), self._every))

    def reorder(self, rows: Tensor) -> None:
        """Row ``i`` is now the former row ``rows[i]``, for as many rows as before."""
        for group in self.groups:
            held = range(group.held)
            self.canary.slots.copy(group.name, group.slots(held, rows), group.slots(held, self._every))
        self._rename_rows()

    def crop(self, end: int) -> None:
        """Only the first ``end`` tokens are left; windows also drop passed tokens. A static window that has moved on
        does not come back."""
        removed = max(self.end - end, 0)
        self.end -= removed
        self._unknown_end = min(self._unknown_end, self.end)
        for group in self.groups:
            if removed and group.first and group.keeping.static_tokens is not None:
                # The bytes stay, and the engine counts its places from the new end: each is read as an earlier token's.
                group.held = min(self.end, group.keeping.static_tokens)
                group.first = self.end - group.held
            else:
                self._move(group, group.keeping.held_after_crop(group.held, removed))

    def clear(self) -> None:
        """Nothing is left; lasting tensors are zeroed."""
        self.end = self._unknown_end = 0
        for group in self.groups:
            self._move(group, 0)
            if group.keeping.static_tokens is not None:
                slots = group.slots(range(group.keeping.static_tokens), self._every)
                self.canary.slots.expect_zeros(group.name, slots)
        self._rename_rows()

    def close(self) -> None:
        """Closes the Canary, which may live on for some time: releases the cache's tensors, and its own memory. Raises
        `ViolationError` in raise mode."""
        try:
            self.canary.close()
        finally:
            self.let_go()
            self.canary.release()

    def let_go_growing(self) -> None:
        """Tensors that are not written in place are about to be made anew, layer by layer: kept, the cache would be
        there twice."""
        self._let_go([group for group in self.groups if group.keeping.static_tokens is None])

    def let_go(self) -> None:
        """Releases the cache's tensors, not read any more."""
        self._let_go(self.groups)

    def _let_go(self, groups: Sequence[Group]) -> None:
        if self.audited and self.canary.enabled:
            return
        for group in groups:
            self.canary.slots.let_go(group.name)
            group.let_go()

    def _rename_rows(self) -> None:
        """Gives each row a new history under its name."""
        names = [f"{self._name} row {row}" for row in range(self.rows)]
        writers = self.canary.writers
        for name in names:
            writers.forget(name)
        self._writers = upload([writers.id(name) for name in names], self.canary.device)

    def _move(self, group: Group, held: int) -> None:
        """The group holds the last ``held`` tokens now: records go where the bytes went."""
        first = self.end - held
        distance = first - group.first
        kept = min(group.held - distance, held)
        if distance > 0 and kept > 0:
            source = group.slots(range(distance, distance + kept), self._every)
            self.canary.slots.copy(group.name, source, group.slots(range(kept), self._every))
        if held < group.held:
            self.canary.slots.clear(group.name, group.slots(range(held, group.held), self._every))
        group.first, group.held = first, held

    def _excuse_pads(self, tokens: Tensor) -> None:
        """``tokens``: the last ones, ``[rows, n]``. A pad's zero embedding gives zero K and V, equal to a static
        tensor's old content: so a lost write of a pad is not seen."""
        if self._pad is None:
            return
        pads = tokens.to(self.canary.device) == self._pad
        for group in self.groups:
            if group.keeping.static_tokens is not None:
                stored = min(pads.shape[1], group.held)
                slots = group.slots(range(group.held - stored, group.held), self._every)
                own = pads[:, pads.shape[1] - stored :].flatten()
                self.canary.slots.forget_bytes(group.name, slots.masked_fill(~own, -1))

    def _drop_passed(self, new: int, held: Mapping[str, int]) -> None:
        """Reports ``new`` tokens of a row beyond the windows as dropped, if all layers have one."""
        if all(group.keeping.window_tokens is not None for group in self.groups):
            most = max(held[group.name] for group in self.groups)
            self.canary.witness.dropped(self.rows * max(new - most, 0))

    def _decode(self, rows: int) -> list[BatchView]:
        """One like those of decodes, to compile for."""
        one = torch.zeros((rows, 1), dtype=torch.int64, device=self.canary.device)
        tables = {group.name: group.table(0, self.canary.device, new=1) for group in self.groups}
        return [self._batch(0, ModelCall(rows, 1, one, one if self._told else None), tables)]

    def _batch(self, prefix: int, forward: ModelCall, tables: Mapping[str, SlotTable]) -> BatchView:
        device = self.canary.device
        return BatchView(
            prefix_lens=self._lengths.of(prefix),
            new_lens=self._lengths.new(forward.new),
            token_ids=forward.token_ids(device, copied=self._issued_first),
            writers=self._writers,
            tables=tables,
            expected_tokens=forward.expected_tokens(prefix, self._unknown_end, device),
        )
