"""`UnguardedForwards`: forwards outside of any check."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from canary_core import Canary, Event, StepListener
from canary_sglang.compat import batches

REASON = "not checked yet; slots that such forwards write are not judged"
BEAMS = (
    "beams of a search have rows without a request of their own, and which of them goes on from which is not known: no "
    "request of a batch with beams is checked in that forward, and slots that it writes are not judged"
)


class UnguardedForwards(StepListener):
    """Forgets the slots possibly written by an unchecked forward, and reports it. ``forget``: forgets slots, numbered
    as in the engine's tables."""

    def __init__(self, canary: Canary, forget: Callable[[Tensor], None]) -> None:
        self._canary = canary
        self._forget_slots = forget
        self._told: set[str] = set()
        self._passed: str | None = None

    def forget(self, batch: Any) -> None:
        """Forgets the slots of ``batch``. Each mode is told once."""
        if not batches.writes_kv(batch):
            return
        mode, reason = batch.forward_mode.name, REASON
        if batches.has_beams(batch):
            mode, reason = "BEAMS", BEAMS
        self._passed = f"{mode.lower()}_forward"
        if mode not in self._told:
            self._told.add(mode)
            self._canary.tell(Event("unguarded_forward", "warning", {"mode": mode, "reason": reason}))
        self._forget_slots(batch.out_cache_loc)

    def computed(self, tokens: int) -> None:
        """The last batch computed ``tokens`` by the scheduler's account: for the witness."""
        passed, self._passed = self._passed, None
        self._canary.witness.computed(tokens)
        if passed is not None:
            self._canary.witness.explain(passed, tokens)
