"""`GivenTables`: the lists and lengths given to a forward's attention, against the cache's own blocks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from canary_adapters import BlockLists, ragged_table
from canary_core import BatchView, Canary, ReadLens, ReadTable
from canary_transformers.continuous import compat
from canary_transformers.continuous.compat import KVGroup


class GivenTables:
    """Compares the read lists, write lists and block tables of one cache's groups, which take turns.

    The view of a forward has these very lists; their origin are the engine's own blocks of each request on the host.
    The cumulative lengths given beside the lists are compared with the view's, which come from the requests.
    """

    def __init__(self, canary: Canary, cache: Any, groups: Sequence[KVGroup]) -> None:
        self._tables = canary.step.tables
        self._lists = BlockLists(canary)
        self._cache = cache
        self._groups = [group for group in groups if group.window_tokens is None or compat.keeps_rings(cache)]
        self._turn = 0

    def compare(self, view: BatchView, names: Sequence[str], arguments: Mapping[str, Any]) -> None:
        """Compares a table of the forward of ``view`` with requests ``names``, where due; before the forward, on its
        stream."""
        made = [make for group in self._groups for make in self._of(group, arguments)]
        for _ in range(len(made)):
            group, make = made[self._turn % len(made)]
            self._turn += 1
            blocks = compat.blocks_of(self._cache, group, names)
            kept = self._lists.kept(blocks, group.block_slots, group.window_tokens or 0)
            if kept is not None:
                lens = tuple(_lens(view, group, arguments))
                if len(lens) < 2:
                    self._tables.leave_out(f"lengths of {group.name}", "some are not given in a known form")
                self._tables.compare([replace(make(view, group, arguments), kept=kept, lens=lens)])
                return
        self._tables.skip()

    def _of(self, group: KVGroup, arguments: Mapping[str, Any]) -> Iterator[tuple[KVGroup, "_Make"]]:
        blocks = arguments.get("block_table") is not None
        if blocks or arguments["read_index"][group.index].numel():
            yield group, _block_table if blocks else _read_index
        if not blocks:
            yield group, _write_index


def _lens(view: BatchView, group: KVGroup, arguments: Mapping[str, Any]) -> Iterator[ReadLens]:
    """Bounds of each row's queries and keys: of a window the keys of at most one token fewer than it has, and
    those of the new tokens."""
    past, new, keys = view.prefix_lens, view.new_lens, arguments.get("cu_seq_lens_k")
    if group.window_tokens is not None:
        past = past.clamp(max=group.window_tokens - 1)
    keys = keys.get(group.name) if isinstance(keys, Mapping) else None
    for name, given, expected in (("q", arguments.get("cu_seq_lens_q"), new), ("k", keys, past + new)):
        if isinstance(given, Tensor) and given.dim() == 1 and given.shape[0] > view.rows:
            yield ReadLens(f"cu_seq_lens_{name} of {group.name}", given, expected, begins=True)


_Make = Callable[[BatchView, KVGroup, Mapping[str, Any]], ReadTable]


def _block_table(view: BatchView, group: KVGroup, arguments: Mapping[str, Any]) -> ReadTable:
    return replace(_read_index(view, group, arguments), name=f"block_table of {group.name}")


def _read_index(view: BatchView, group: KVGroup, arguments: Mapping[str, Any]) -> ReadTable:
    table, prefix, end = view.tables[group.name], view.prefix_lens, view.prefix_lens + view.new_lens
    first = prefix.new_zeros(len(prefix))
    if group.window_tokens is not None:
        # It has the last positions before the new ones; these do not come from the cache.
        first, end = (prefix - group.window_tokens + 1).clamp(min=0), prefix
    return ReadTable(f"read_index of {group.name}", group.name, table, table, first, end, view.writers)


def _write_index(view: BatchView, group: KVGroup, arguments: Mapping[str, Any]) -> ReadTable:
    table, prefix, new = view.tables[group.name], view.prefix_lens, view.new_lens
    slots: Tensor = arguments["write_index"][group.index]
    given = ragged_table(slots, new.cumsum(0) - new - prefix, pool_page=group.pool_page)
    first = prefix
    if group.window_tokens is not None:
        # Of more new tokens than a window holds, the first ones are stored nowhere.
        first = prefix + (new - group.window_tokens).clamp(min=0)
    return ReadTable(f"write_index of {group.name}", group.name, given, table, first, prefix + new, view.writers)
