"""An engine without a recomputer, where ``CANARY_RECOMPUTE`` is on."""

import time

from support.guarded import Guarded

from canary_core.guard.glances import LOOKED_AT


def test_it_is_told_once_that_nobody_can_compute_anything_again():
    """Once forwards go on; never where it is off."""
    for setting, told in (("1%", 1), ("0", 0)):
        guarded = Guarded(recompute=setting)
        guarded.submit()
        for _ in range(LOOKED_AT + 1):
            guarded.step()
        for _ in range(3):
            guarded.canary._lookout.look(time.monotonic())
        assert len(guarded.findings.told("recompute_off")) == told
