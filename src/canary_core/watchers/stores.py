"""`StoreCheck`: whether bytes stored by a layer are the same at the end of the forward."""

from collections.abc import Collection

from canary_core.batch import BatchView, SlotTable
from canary_core.ops.state import RegionState
from canary_core.runtime.streams import capturing
from canary_core.runtime.workspace import Switch, Workspace


class StoreCheck:
    """With ``CANARY_STORE_CHECK``: a plugin reports each layer's store once issued (`stored`); the layer's bytes in the
    new slots are fingerprinted at once, and compared when the forward is recorded. In regions of one token a slot. A
    layer without a report is not judged, nor is a store replayed from a CUDA graph.

    noted: number of fingerprinted stores of a layer.
    """

    def __init__(self, workspace: Workspace, switch: Switch) -> None:
        self._workspace = workspace
        self._switch = switch
        self._view: BatchView | None = None
        self._stale = False
        self._columns: dict[tuple[str, int, frozenset[str] | None], tuple[int, ...]] = {}
        self.noted = 0
        self.on = any(state.stores.numel() for state in workspace.states.values())
        """Whether stores are checked. Then the writes of a forward are planned before it."""

    def begin(self, view: BatchView) -> None:
        """A forward of ``view`` was checked, on the stream of the forward's own launches."""
        if not self.on:
            return
        if self._stale:
            self._stale = False
            for state in self._workspace.states.values():
                state.stores.zero_()
        self._view = view

    def stored(self, layer: int, halves: Collection[str] | None = None, region: str | None = None) -> None:
        """See `Step.stored`."""
        if self._view is None or not self._switch.enabled or capturing(self._workspace.device):
            return
        with self._switch.guard("step.stored"):
            for name in self._view.tables:
                if region not in (None, name):
                    continue
                state = self._workspace.states[name]
                key = (name, layer, None if halves is None else frozenset(halves))
                columns = self._columns.get(key)
                if columns is None:
                    columns = self._columns[key] = _columns_of(state, layer, halves)
                if columns:
                    self._workspace.backend.note_store(state, self._view, columns)
                    self.noted += 1

    def compare(self, state: RegionState, view: BatchView, table: SlotTable) -> None:
        """The forward's new slots were fingerprinted, and are recorded next."""
        if self._view is not None and state.stores.numel():
            self._workspace.backend.compare_stores(state, view, table)

    def end(self, compared: bool) -> None:
        """The forward is recorded, or was abandoned: notes not ``compared`` are void for the next one."""
        self._stale |= self._view is not None and not compared
        self._view = None

    def stats(self) -> dict[str, int]:
        """Counts of checked stores; empty without any."""
        return {"noted_stores": self.noted} if self.noted else {}


def _columns_of(state: RegionState, layer: int, halves: Collection[str] | None) -> tuple[int, ...]:
    if not state.stores.numel():
        return ()
    wanted = (s.layer == layer and (halves is None or s.half in halves) for s in state.sources)
    return tuple(column for column, chosen in enumerate(wanted) if chosen)
