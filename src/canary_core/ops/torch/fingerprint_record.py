"""fingerprint_record: fingerprints and records a forward's writes, in any order."""

from canary_core.batch import BatchView, SlotTable
from canary_core.ops.state import RegionState
from canary_core.ops.torch.fingerprint import fingerprint
from canary_core.ops.torch.record import record


def fingerprint_record(state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """After a forward: `fingerprint` and `record`, independent of each other."""
    fingerprint(state, batch, table)
    record(state, batch, table)
