"""``CANARY_ON_VIOLATION=protect`` on a device: what a check finds is handed to plugins when the host has waited for the
forward's own work, as an engine does for its tokens, and not a step later."""

from threading import Thread

import pytest
import torch
from gpu.engine import Run, no_waiting
from gpu.faults import ready, table_entry
from gpu.test_graph import MODES, ON_GPU

from canary_core import Kind
from canary_core.runtime.memory_proof import LOOKED_FORWARDS


@pytest.mark.parametrize("beside", [False, True], ids=["in_place", "in_a_thread"])
@pytest.mark.parametrize("mode", ON_GPU)
def test_the_verdict_is_there_when_the_tokens_are(mode, beside):
    """The next forward is under way by then, and nothing waits for it: the device sleeps in it. A clean forward makes
    no verdict, and nobody waits for anything."""
    run = Run(*MODES[mode], on_violation="protect", scrub_budget="0")
    run.clean(LOOKED_FORWARDS + 4)
    reader = run.canary.step.reader

    def judge() -> None:
        if not beside:
            reader.judge()
            return
        thread = Thread(target=reader.judge)
        thread.start()
        thread.join()

    torch.cuda.synchronize()
    with no_waiting():
        judge()
    assert run.verdicts == []
    step = run.traffic.next()
    while not ready(step):
        run.stage(step)
        run.issue()
        run.traffic.commit(step)
        step = run.traffic.next()
    run.stage(step)
    broken = table_entry(lambda r: r.slots[2], Kind.POSITION)(run, step)
    run.issue()
    tokens = torch.cuda.Event()
    tokens.record()
    asleep = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    asleep.record()
    tokens.synchronize()
    judge()
    assert not asleep.query()
    verdicts = [(v.finding.kind, v.finding.slot, None) for v in run.verdicts]
    assert broken.findings <= set(verdicts)
    assert all(v.stands for v in run.verdicts if v.finding.kind is Kind.POSITION)
