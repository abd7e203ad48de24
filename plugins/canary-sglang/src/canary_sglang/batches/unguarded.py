"""`UnguardedForwards`: kinds of forward that can't be checked."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from canary_core import Canary, Event, StepListener
from canary_sglang.compat import batches


class UnguardedForwards(StepListener):
    """A forward that can't be checked may have written any of its slots: what was known of them holds no more.
    ``forget``: does so for slots of the engine's tables."""

    def __init__(self, canary: Canary, forget: Callable[[Tensor], None]) -> None:
        self._canary = canary
        self._forget_slots = forget
        self._told: set[str] = set()

    def forget(self, batch: Any) -> None:
        """Each kind of forward is told once."""
        if not batches.writes_kv(batch):
            return
        mode = batch.forward_mode.name
        if mode not in self._told:
            self._told.add(mode)
            reason = "not checked yet; slots that such forwards write are not judged"
            self._canary.tell(Event("unguarded_forward", "warning", {"mode": mode, "reason": reason}))
        self._forget_slots(batch.out_cache_loc)
