"""`Canary`: guards the pools of one engine, three calls a step."""

from collections.abc import Iterable, Sequence

import pluggy
from torch import Tensor

from canary_core.adapters import Writers
from canary_core.batch import BatchView
from canary_core.config import CanaryConfig
from canary_core.region import KVSource, Region, Uncovered


class Canary:
    """Remembers what is in every slot of ``regions`` and checks it around each forward.

    Order per step: `pre_forward` (before the engine's forward), `post_forward` (after it, same stream), `end_step`
    (host only). In log mode none of the three ever raises into the engine: an exception of ours disables this Canary
    with a ``disabled`` event. In raise mode `end_step` raises `ViolationError`, which carries the first finding.

    ``hooks``: plugin manager that receives findings and events (default: `canary_core.plugins.manager()`).
    ``writers``: names of writer ids for reports. Raises `AttachError` if the regions do not fit together.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        config: CanaryConfig | None = None,
        *,
        hooks: pluggy.PluginManager | None = None,
        writers: Writers | None = None,
        uncovered: Iterable[Uncovered] = (),
    ) -> None: ...

    config: CanaryConfig
    writers: Writers
    enabled: bool
    """False once an exception of ours, or mode off, has switched this Canary off."""

    @property
    def regions(self) -> dict[str, Region]:
        """The guarded regions by name."""

    def pre_forward(self, batch: BatchView) -> None:
        """Checks every slot the forward will read. May be captured in a graph."""

    def post_forward(self, batch: BatchView) -> None:
        """Records the slots the forward has written (the same ``batch`` as `pre_forward`), then scrubs the next
        stretch. May be captured in a graph."""

    def end_step(self) -> None:
        """Host only, never captured: starts a late read of the counters and reports what the last one brought."""

    def drain(self) -> None:
        """Waits for the device and reports everything found so far. For shutdown and tests: it synchronizes."""

    def copy_slots(self, region: str, source: Tensor, destination: Tensor) -> None:
        """The engine copied slots ``source`` to ``destination`` (integer tensors ``[n]``, region slots): records
        travel with the bytes. Call it when the copy was issued, on the same stream. Overlaps are read first."""

    def forget_slots(self, region: str, slots: Tensor) -> None:
        """Bytes of ``slots`` (integer tensor ``[n]``) arrived without records: not judged until written again."""

    def clear_slots(self, region: str, slots: Tensor) -> None:
        """``slots`` hold nothing any more (a roll-back, a reset): reading one before it is written is a finding."""

    def rebind(self, region: str, sources: Sequence[KVSource]) -> None:
        """The engine moved the region's bytes to other tensors (a cache that grew): same slots, same records, new
        addresses. Sources must match the old ones in number, half and layer. Never captured."""

    def stats(self) -> dict[str, int]:
        """The counters as of the last host read, by lower-case name of `Counter` and `Kind`; plus ``violations``,
        their sum without dismissed ones."""
