"""`PrefixHits`: slots that requests share from the prefix cache are compared before a forward reads them."""

from collections.abc import Sequence
from typing import Any

import torch

from canary_adapters import hits_unchecked
from canary_core import Canary
from canary_sglang.compat import runners, schedulers

UNSEEN_STATES = (
    "recurrent states that decodes leave in the prefix cache are compared only if the decode was looked at; "
    "CANARY_STATE_INTERVAL=1 looks at all, and --mamba-radix-cache-strategy extra_buffer leaves none"
)
"""Of a model whose forwards take no checkpoints of states."""


def tell_unseen_states(canary: Canary, runner: Any) -> None:
    """A ``hits_unchecked`` event, where hits are compared, and the bytes of `UNSEEN_STATES` are unknown."""
    unseen = canary.config.state_interval > 1 and not runner.server_args.disable_radix_cache
    untold = hits_unchecked(canary.config, UNSEEN_STATES) if unseen else None
    if untold is not None:
        canary.tell(untold)


class PrefixHits:
    """Compares the bytes of all slots that requests of a batch share from the prefix cache, once for each request, as
    set by ``CANARY_HIT_CHECK``. Slots that HiCache is loading beside the forward are unknown until then, and compared
    after the load (`transfer.hicache`). A ``hits_unchecked`` event says why none are compared. ``regions``: names
    of regions numbered by the engine's slot table.
    """

    def __init__(self, canary: Canary, runner: Any, regions: Sequence[str]) -> None:
        self._canary = canary
        self._entries = runner.req_to_token_pool.req_to_token
        self._regions = regions
        self._rows: list[tuple[int, int]] = []
        loads = "copies of LMCache are loaded layer by layer while the forward runs"
        untold = hits_unchecked(canary.config, loads if runners.lmcache(runner) else None) if regions else None
        self._on = canary.config.hit_check and bool(regions) and untold is None
        if untold is not None:
            canary.tell(untold)

    def notice(self, batch: Any) -> None:
        """Takes the `ScheduleBatch` of the next forward."""
        self._rows = schedulers.prefix_hits(batch) if self._on else []

    def check(self) -> None:
        """Before the forward, on its stream: the prefix of a later chunk may be under way until here."""
        rows, self._rows = self._rows, []
        if rows:
            slots = torch.cat([self._entries[row, :length] for row, length in rows])
            self._canary.count("hit_slots", len(slots))
            for name in self._regions:
                self._canary.slots.check(name, self._canary.regions[name].slots_of(slots))
