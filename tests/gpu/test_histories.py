"""Histories of slots where the forwards run: in a CUDA graph they have the steps of the replays, and nothing waits."""

import random
from collections import defaultdict

import pytest
import torch
from gpu.engine import Run
from gpu.test_graph import ANYWHERE, MODES
from ops import test_histories as small
from ops.scenario import differences, twin

from canary_core.ops.histories import read
from canary_core.records import HISTORY, Clock


@pytest.mark.parametrize("mode", ANYWHERE)
def test_histories_have_the_steps_of_replays(mode):
    """A hundred forwards of changing batches, before each of which its new slots are given to their requests by an
    event: each slot's last four entries are what was done to it, by whom and at which step, and no call of ours
    allocates or waits. In a graph no host code runs for a replay, so the steps are those of the device."""
    run = Run(*MODES[mode])
    run.clean(20)
    state = run.canary.states["full"]
    # A write by the same request as before takes its place, which is not what this is about.
    run.canary.step.join()
    state.histories.zero_()
    first = int(state.shared.clock[Clock.NEXT])
    lives: dict[int, list[tuple[int, str, int]]] = defaultdict(list)
    run.audit = mode != "cpu"
    for number in range(100):
        step = run.traffic.next()
        run.stage(step)
        done, given = first + number, defaultdict(list)
        for request, position in step.live:
            given[run.writers.id(request.name)].append(request.slots[position])
        for writer, slots in given.items():
            tensor = torch.tensor(slots, device=run.device)
            run.ours(lambda tensor=tensor, writer=writer: run.canary.slots.share("full", tensor, writer))
            for slot in slots:
                if lives[slot] and lives[slot][-1][1] == "share":
                    lives[slot].pop()
                lives[slot] += [(done, "share", writer), (done + 1, "write", writer)]
        run.ours(run.canary.slots.settle)
        run.issue()
        run.traffic.commit(step)
    run.audit = False
    assert run.found() == []
    assert run.allocated == 0
    now = int(state.shared.clock[Clock.NEXT])
    assert now == first + 100
    noted = [[(h.step, h.event, h.who) for h in read(row, now)] for row in state.histories.tolist()]
    assert noted[1:-1] == [lives[slot][-HISTORY:] for slot in range(1, len(noted) - 1)]
    assert sum(len(life) == HISTORY for life in noted) > 20


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_the_last_things_are_noted_on_the_gpu(seed):
    """Compiled: random events of pages and slots, some of them listed twice, against plain Python."""
    state = small.state_of(device="cuda")
    oracle = small.traffic(small.triton_backend(), state, random.Random(seed), steps=40)
    assert small.lives(state)[:-1] == [oracle.lives[slot] for slot in range(small.SLOTS)]


@pytest.mark.gpu
def test_slots_that_many_programs_list_are_noted_once():
    """A hundred thousand entries of a few slots in one launch: the atomic lets one of them note it."""
    state = small.state_of(device="cuda")
    slots = torch.randint(1, small.SLOTS, (100_000,), device="cuda")
    for step, event in enumerate(small.EVENTS * 20):
        state.shared.clock.fill_(step)
        other = twin(state)
        getattr(small.triton_backend(), event)(state, slots, 5, 1)
        getattr(small.torch_backend(), event)(other, slots, 5, 1)
        assert "histories" not in differences(state, other, 0)
