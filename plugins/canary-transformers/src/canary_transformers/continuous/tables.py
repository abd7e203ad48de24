"""`GivenTables`: the lists given to a forward's attention, against the cache's own blocks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from canary_adapters import BlockLists, ragged_table
from canary_core import BatchView, Canary, ReadTable
from canary_transformers.continuous import compat
from canary_transformers.continuous.compat import KVGroup


class GivenTables:
    """Compares the read lists, write lists and block tables of one cache's groups, which take turns.

    The view of a forward has these very lists; their origin are the engine's own blocks of each request on the host.
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
                self._tables.compare([replace(make(view, group, arguments), kept=kept)])
                return
        self._tables.skip()

    def _of(self, group: KVGroup, arguments: Mapping[str, Any]) -> Iterator[tuple[KVGroup, "_Make"]]:
        blocks = arguments.get("block_table") is not None
        if blocks or arguments["read_index"][group.index].numel():
            yield group, _block_table if blocks else _read_index
        if not blocks:
            yield group, _write_index


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
