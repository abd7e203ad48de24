"""Canary's bracket in a CUDA graph, around attention as engines run it: no false alarm, every fault found, no
allocation and no wait for the device. What needs no graph runs on the CPU as well, eagerly."""

import json
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from gpu.engine import SLOTS, WIDTH, Run, Size, Step, no_waiting, warm_up
from gpu.faults import FAULTS, PLACES, flipped_bit, ready, table_entry
from torch.profiler import ProfilerActivity, profile, record_function

from canary_core import BatchView, Kind, SlotTable, State
from canary_core.guard.reporting.read_times import READ_S
from canary_core.records import POSITION

MODES = {
    "cpu": ("cpu",),
    "gpu_eager": ("cuda",),
    "gpu_beside": ("cuda", False, True),
    "gpu_graph": ("cuda", True),
}
ANYWHERE = [m if m == "cpu" else pytest.param(m, marks=pytest.mark.gpu) for m in MODES]
ON_GPU = [pytest.param(m, marks=pytest.mark.gpu) for m in MODES if m != "cpu"]


@pytest.mark.parametrize("mode", ANYWHERE)
def test_clean_traffic_has_no_findings(mode):
    """A thousand forwards of changing batches: requests come and go, prefixes are shared, slots are used again. Each
    slot that is read was checked, each that was written recorded, the whole pool scrubbed every time."""
    steps = 60 if mode == "cpu" else 1000
    run = Run(*MODES[mode])
    started = run.canary.stats()["scrubbed_slots"]
    run.clean(steps)
    stats = run.canary.stats()
    assert run.traffic.submitted > steps / 20
    assert stats["checked_slots"] == run.checked > 0
    assert stats["recorded_slots"] == run.recorded > 0
    assert stats["scrubbed_slots"] - started >= steps * SLOTS
    assert stats["unknown_slots"] == 0


@pytest.mark.gpu
def test_tables_may_change_on_a_stream_that_follows_the_check():
    """An engine prepares its next batch on a stream of its own while a forward runs. However late the check beside that
    forward comes, it reads the tables as they were."""
    run = Run(*MODES["gpu_beside"])
    run.clean(12)
    prepare(run)
    scheduler = torch.cuda.Stream()
    scheduler.wait_stream(torch.cuda.current_stream())
    # A tenth of a second, for which the check waits.
    torch.cuda._sleep(200_000_000)
    run.issue()
    with torch.cuda.stream(scheduler):
        run.canary.step.follow_check()
        run.model.table.zero_()
    assert run.found() == []


@pytest.mark.parametrize("mode", ON_GPU)
def test_the_engine_computes_the_same_under_guard(mode):
    """Every byte of the pools but the padding slot's is that of the same engine without Canary."""
    guarded, bare = Run(*MODES[mode]), Run(*MODES[mode], guard=False)
    guarded.clean(200)
    for _ in range(200):
        step = bare.traffic.next()
        bare.stage(step)
        bare.graph.replay() if bare.graph else bare.issue()
        bare.traffic.commit(step)
    for layer, half in PLACES:
        assert torch.equal(guarded.model.pools[layer][half][1:], bare.model.pools[layer][half][1:])


@pytest.mark.parametrize("mode", ANYWHERE)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found(fault, mode):
    """Between replays and inside of them: what went wrong, in which slot, and for bytes in which layer and half. Where
    it is put right again, nothing more is found."""
    run = Run(*MODES[mode])
    run.clean(12)
    step = prepare(run)
    broken = FAULTS[fault](run, step)
    run.issue()
    if fault == "freed_slot" and run.graph:
        # No host code of ours runs before a replay, so events take effect after the next one.
        follow(run, step)
    found = run.found()
    assert broken.findings <= {(v.kind, v.slot, v.source) for v in found}
    assert {v.kind for v in found} <= {kind for kind, *_ in broken.findings} | broken.kinds
    assert {v.region for v in found} == {"full"}
    if broken.undo:
        broken.undo()
        run.traffic.commit(step)
        run.clean(10)


def prepare(run: Run) -> Step:
    """Goes on until a step has a place for every fault; stages it."""
    for _ in range(50):
        step = run.traffic.next()
        run.stage(step)
        if ready(step):
            return step
        run.issue()
        run.traffic.commit(step)
    raise AssertionError("no step with a reader and two writers in 50; check the traffic")


def follow(run: Run, step: Step) -> None:
    """The step after ``step``."""
    run.traffic.commit(step)
    after = run.traffic.next()
    run.stage(after)
    run.issue()


@pytest.mark.parametrize("mode", ON_GPU)
def test_nothing_is_allocated_and_nothing_waits(mode):
    """500 steps, whose reads of the counters arrive in between: torch's allocator isn't asked once, and no call of ours
    waits for the device. Nor where something is found and the ring is read."""
    run = Run(*MODES[mode])
    run.clean(100)
    run.audit = True
    run.clean(500)
    assert run.allocated == 0
    step = prepare(run)
    broken = flipped_bit(0, 1)(run, step)
    run.issue()
    run.canary.step.join()
    broken.undo()
    run.traffic.commit(step)
    torch.cuda.synchronize()
    # The host learns of it when its next read of the counters has arrived, and reads the ring in the one after that.
    for _ in range(4 * run.canary.config.read_interval):
        time.sleep(READ_S)
        step = run.traffic.next()
        run.stage(step)
        run.issue()
        run.traffic.commit(step)
        torch.cuda.synchronize()
    assert [v.kind for v in run.violations] == [Kind.BYTES]
    assert run.allocated == 0
    assert run.canary.enabled


@pytest.mark.gpu
def test_arrivals_and_events_never_wait():
    """Copies, exports, imports from the host, marks, allocator's events: issued and applied without a wait."""
    run = Run("cuda")
    run.clean(20)
    state = run.canary.states["full"]
    old, new = torch.arange(1, 9, device="cuda"), torch.arange(20, 28, device="cuda")
    parked = run.canary.slots.export_records("full", old).cpu().pin_memory()
    view = idle_view(Size())

    def arrive() -> None:
        run.canary.slots.copy("full", old, new)
        run.canary.slots.export_records("full", old)
        run.canary.slots.import_records("full", new, parked)
        run.canary.slots.forget("full", new)
        run.canary.slots.clear("full", new)
        run.canary.slots.free("full", old)
        run.canary.slots.alloc("full", old)
        run.canary.slots.import_records("full", old, parked)
        run.canary.step.before(view)

    arrive()
    with no_waiting():
        arrive()
    torch.cuda.synchronize()
    records = state.records[old].cpu()
    assert bool((records[:, POSITION] & State.ARRIVED).all())
    records[:, POSITION] &= ~State.ARRIVED
    assert torch.equal(records.view(torch.int64), parked[:, 1:5])
    assert run.canary.enabled


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ON_GPU)
def test_the_profiler_sees_three_kernels_and_no_wait(mode, tmp_path):
    """Of one forward with all of a pool's layers: check, fingerprint and record in one, scrub. Nothing in our calls
    waits for a stream, an event or the device."""
    run, steps = Run(*MODES[mode]), 20
    run.clean(30)
    run.ours, run._forward = within_a_window, lambda: within(ENGINES_WINDOW, run.model.forward)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            step = run.traffic.next()
            run.stage(step)
            run.issue()
            run.traffic.commit(step)
        torch.cuda.synchronize()
    seen.export_chrome_trace(str(tmp_path / "trace.json"))
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e.get("ph") == "X"]
    noted = [e for e in events if e.get("cat") == "user_annotation"]
    windows, engines = (
        [(e["ts"], e["ts"] + e["dur"]) for e in noted if e["name"] == n] for n in (WINDOW, ENGINES_WINDOW)
    )
    assert len(windows) == steps * (2 if mode == "gpu_graph" else 1)
    assert len(engines) == steps * (mode != "gpu_graph")
    calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    ours = [e for e in calls if among(e["ts"], windows) and not among(e["ts"], engines)]
    assert [e["name"] for e in ours if "ynchronize" in e["name"]] == []
    assert [e["name"] for e in ours if "Malloc" in e["name"] or "Free" in e["name"]] == []
    kernels = [e for e in events if e.get("cat") == "kernel"]
    assert kernels, "the profiler saw no kernel: is CUPTI there?"
    if run.graph:
        launched = [e for e in kernels if e["name"].split("(")[0] in KERNELS]
    else:
        launches = {e["args"].get("correlation") for e in ours if "aunch" in e["name"]}
        launched = [e for e in kernels if e["args"].get("correlation") in launches or e["name"] in KERNELS]
    # The scrub's length follows the engine's pace: now and then a number is filled in.
    fills = [e for e in launched if "FillFunctor" in e["name"]]
    assert len(fills) <= steps // 4
    assert {e["name"] for e in launched if e not in fills} == KERNELS
    assert len(launched) - len(fills) == 3 * steps


WINDOW, ENGINES_WINDOW = "canary's own call", "the engine's forward within it"
KERNELS = {"check_kernel", "fingerprint_record_kernel", "scrub_kernel"}


def within(window: str, call: Callable[[], object]) -> object:
    """Calls it under a name that the profiler notes."""
    with record_function(window):
        return call()


within_a_window = partial(within, WINDOW)


def among(time: float, windows: list[tuple[float, float]]) -> bool:
    """Whether it lies in one of them."""
    return any(first <= time <= last for first, last in windows)


BIG = Size(rows=300, tokens=9000)
"""More than Canary's scratch has room for at first."""


def idle_view(size: Size) -> BatchView:
    """A forward of that capacity that reads and writes nothing."""
    i32 = dict(dtype=torch.int32, device="cuda")
    rows, tokens = torch.zeros(size.rows, **i32), torch.zeros(size.tokens, **i32)
    table = SlotTable(torch.zeros(size.rows, WIDTH, **i32))
    return BatchView(rows, rows, tokens, rows - 1, {"full": table})


@pytest.mark.gpu
def test_scratch_that_grows_inside_a_capture_works():
    """Captured without an eager run, a larger batch than ever before: the scratch then belongs to the graph, and both
    replays and eager forwards go on with it."""
    # Kernels are compiled, libraries loaded: what is left to a capture is Canary's own memory.
    compiled = Run("cuda", size=BIG)
    compiled.stage(Step([None] * BIG.rows, [0] * BIG.rows))
    warm_up(compiled.bracket)
    run = Run("cuda", graph=True, size=BIG, warm=False)
    assert run.canary.states["full"].scratch.plan.shape[0] >= BIG.tokens
    run.clean(50)
    for i in range(30):
        step = run.traffic.next()
        run.stage(step)
        run.issue(eager=i % 3 == 0)
        run.traffic.commit(step)
    assert run.found() == []
    step = prepare(run)
    broken = flipped_bit(1, 0)(run, step)
    run.issue()
    assert broken.findings == {(v.kind, v.slot, v.source) for v in run.found()}


@pytest.mark.gpu
def test_a_graph_survives_scratch_that_grows_after_it():
    """Its launches keep the scratch they were captured with."""
    run = Run("cuda", graph=True)
    run.clean(20)
    view = idle_view(BIG)
    run.canary.step.before(view)
    run.canary.step.after(view)
    assert run.canary.states["full"].scratch.plan.shape[0] >= BIG.tokens
    run.clean(50)
    step = prepare(run)
    broken = table_entry(lambda r: r.slots[2], Kind.POSITION)(run, step)
    run.issue()
    assert broken.findings <= {(v.kind, v.slot, v.source) for v in run.found()}


@pytest.mark.gpu
def test_events_take_effect_between_replays():
    """Where all forwards are replays, what the allocator tells is applied at the end of each step, never piled up."""
    run = Run("cuda", graph=True)
    slots = torch.tensor([SLOTS - 1], device="cuda")
    run.traffic.free.remove(SLOTS - 1)
    for _ in range(20):
        run.canary.slots.alloc("full", slots)
        run.canary.slots.free("full", slots)
        run.clean(1)
    assert run.found() == []
    assert len(run.canary.slots.workspace.queue) == 0
