"""`ComparedRegions`: the regions of an engine that are compared where a request is computed again, and their slots."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from canary_adapters import BlockGroup
from canary_core import Canary, RegionKind
from canary_sglang.compat import runners, schedulers
from canary_sglang.pools import mamba

KINDS = (RegionKind.FULL, RegionKind.WINDOW)
NO_STATES = torch.empty(0, dtype=torch.int64)


class ComparedRegions:
    """Those with a slot for each token, in the order of ``paged``, then the recurrent states.

    regions: without the states. groups: for `RecomputePairs`.
    """

    def __init__(self, canary: Canary, runner: Any, paged: Sequence[str]) -> None:
        known = [canary.regions[name] for name in paged]
        self.regions = [region for region in known if region.kind in KINDS and region.tokens_per_slot == 1]
        self._states = mamba.REGION in canary.regions
        names = [region.name for region in self.regions] + [mamba.REGION] * self._states
        self.groups = [BlockGroup(name, number, 1) for number, name in enumerate(names)]
        self._runner = runner
        self._refusal = mamba.recompute_refusal(runner)
        if len(names) != len(canary.regions):
            self._refusal = "of models with rings or compressed KV nothing is computed again"

    @property
    def refusal(self) -> str | None:
        """Why nothing of the engine is computed again, None where something is. Asked once the runner has an attention
        backend, made after the pools."""
        windows = any(region.kind is RegionKind.WINDOW for region in self.regions)
        return self._refusal or (runners.window_refusal(self._runner) if windows else None)

    def slots(self, numbers: Tensor, states: Tensor = NO_STATES) -> Sequence[Tensor]:
        """Those of each region, of slots as numbered in the engine's tables; then the slot of ``states``."""
        try:
            slots = [region.slots_of(numbers) for region in self.regions]
            return [*slots, states] if self._states else slots
        except torch.OutOfMemoryError:
            # Nothing is compared, on this rank.
            return []

    def states(self, scheduler: Any, request: Any) -> Tensor:
        """The slot of a request's states."""
        return schedulers.states(scheduler, request) if self._states else NO_STATES
