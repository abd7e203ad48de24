"""`Canary.warm_up`: what forwards need is compiled before the first of them, and nothing else has changed."""

from collections.abc import Iterator
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import replace
from threading import Thread

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core import BatchView, Canary, CanaryConfig, KVSource, Region, RegionKind, SlotTable, private_hooks
from canary_core.ops.backends import torch_backend
from canary_core.ops.kernels import (
    blocks,
    check,
    compare_kv,
    fingerprint,
    fingerprint_record,
    launch,
    lifetime,
    read_check,
    record,
    repair,
    scrub,
    verify,
)
from canary_core.ops.launches import LateCompiles

KERNELS = (
    check.check_kernel, record.record_kernel, fingerprint.fingerprint_kernel,
    fingerprint_record.fingerprint_record_kernel, read_check.read_check_kernel, scrub.scrub_kernel,
    verify.verify_kernel, lifetime.lifetime_kernel, blocks.adopt_kernel, blocks.gather_blocks_kernel,
    repair.repair_kernel, repair.prove_kernel, compare_kv.compare_kv_kernel,
)  # fmt: skip


class Padded(Guarded):
    """A toy engine under a Canary with every check on, and padding as its batches look."""

    def __init__(self, device: str = "cpu", backend: str = "triton", warms_up: bool = False) -> None:
        engine = ToyEngine(slots=512, device=device, window=8)
        super().__init__(engine, warms_up=warms_up, read_check=-1, repair=True, recompute="1%", backend=backend)

    def padding(self, rows: int) -> Iterator[BatchView]:
        none = torch.zeros(rows, dtype=torch.int32, device=self.engine.device)
        table = SlotTable(self.engine.table, write_slots=none.long())
        expected = none.new_full((rows, 20), -1)
        names = [region.name for region in self.engine.regions()]
        yield BatchView(none, none, none, none, dict.fromkeys(names, table), expected_tokens=expected)

    def memory(self) -> list[torch.Tensor]:
        """All that Canary remembers from one forward to the next."""
        states = self.canary.states.values()
        shared = next(iter(states)).shared
        own = [[s.records, s.fingerprints, s.scratch.claims, s.chains, s.cursors] for s in states]
        return [
            t.clone() for t in (shared.counters, shared.clock, shared.ring, *(t for tensors in own for t in tensors))
        ]


def compiled() -> int:
    """Kernels that Triton has compiled in this process."""
    return sum(len(cache[0]) for kernel in KERNELS for cache in kernel.device_caches.values())


def test_a_warm_up_leaves_no_trace():
    """Neither of slots nor of counters, cursors or the step; the traffic around it is clean."""
    g = Padded()
    g.engine.submit("a", list(range(5, 25)))
    g.step(3)
    before = g.memory()
    g.canary.warm_up(g.padding, most_rows=2)
    assert all(torch.equal(old, new) for old, new in zip(before, g.memory(), strict=True))
    for _ in range(3):
        g.step(3)
    g.canary.drain()
    stats = g.canary.stats()
    assert stats["violations"] == 0
    assert stats["checked_forwards"] == 4 * len(g.canary.regions)


def test_slots_are_fingerprinted_by_the_warm_up_where_that_was_put_off():
    """All of them, once; by then the length of the scrub is known, too."""
    g = Padded(warms_up=True)
    state = g.canary.states["full"]
    assert not state.fingerprints.any()
    g.canary.warm_up(g.padding, most_rows=2)
    found = state.fingerprints.clone()
    torch_backend().baseline(state)
    # That of the null slot says that its numbers are finite.
    assert torch.equal(state.fingerprints[1:], found[1:])
    assert all(stretch.slots > 0 for stretch in g.canary.step.scrub.stretches)
    state.fingerprints.fill_(7)
    g.canary.warm_up(g.padding, most_rows=2)
    assert (state.fingerprints == 7).sum() > 500


def test_what_a_warm_up_fingerprints_is_guarded():
    """The engine's traffic after it is clean, and its bytes are compared."""
    g = Padded(warms_up=True)
    g.canary.warm_up(g.padding, most_rows=2)
    g.engine.submit("a", list(range(5, 25)))
    for _ in range(3):
        g.step(3)
    g.canary.drain()
    stats = g.canary.stats()
    assert stats["violations"] == 0
    assert stats["recorded_bytes"] > 0


def test_batches_of_each_step_are_warmed_up():
    """From one row up to the largest batch, which need not be as large as the step it belongs to."""
    g = Padded()
    asked = []
    g.canary.warm_up(lambda rows: asked.append(rows) or (), most_rows=300)
    assert asked == [1, 256, 300]


def test_nothing_is_warmed_up_where_nothing_is_compiled():
    """The torch back end needs none of it."""
    Padded(backend="torch").canary.warm_up(lambda rows: pytest.fail("asked for batches"), most_rows=100)


def test_how_long_it_took_is_told(monkeypatch):
    """A start that takes long has a reason that can be read: one event, with the batches and the seconds."""
    backend = replace(torch_backend(), row_steps=(16, 64))
    monkeypatch.setattr("canary_core.ops.backends.torch_backend", lambda: backend)
    g = Padded(backend="torch")
    g.canary.warm_up(g.padding, most_rows=20)
    (event,) = g.findings.told("warmed_up")
    assert (event.fields["backend"], event.fields["batches"]) == ("torch", 3)
    assert event.fields["seconds"] >= 0


@pytest.mark.gpu
def test_after_a_warm_up_nothing_is_compiled_while_serving():
    """Whatever the forwards' sizes, and wherever the lists of slots begin that the engine hands in."""
    g = Padded("cuda")
    g.canary.warm_up(g.padding, most_rows=16)
    before = compiled()
    assert before > 0
    for i in range(12):
        g.engine.submit(f"r{i}", list(range(5, 25)))
        g.step(3)
        slots = torch.arange(400, 440, device="cuda")[i:]
        g.canary.slots.alloc("full", slots)
        g.canary.slots.free("full", slots)
    g.canary.drain()
    assert compiled() == before


def test_long_forwards_and_short_ones_are_warmed_up(monkeypatch):
    """An engine with long tables serves one request as well as many: the check has a form for each."""
    monkeypatch.setattr("canary_core.ops.readers.SPANS", 1)
    g = Padded()
    g.canary.warm_up(g.padding, most_rows=16)
    (launches,) = g.canary.states["full"].launches.by_table.values()
    assert {"check", "check, but long", "check_long"} <= launches.by_op.keys()


@pytest.mark.gpu
def test_a_kernel_that_is_compiled_while_serving_is_told():
    """Rows of the engine's table that lie another distance apart than those of the warm-up."""
    g = Padded("cuda")
    g.canary.warm_up(g.padding, most_rows=16)
    before = g.canary.stats().get("late_compiles", 0)
    wider = torch.zeros(16, 65, dtype=torch.int32, device="cuda")
    g.engine.table = wider[:, :64]
    g.engine.submit("a", list(range(5, 25)))
    g.step(3)
    g.canary.drain()
    assert "check_kernel" in {event.fields["kernel"] for event in g.findings.told("compiled_late")}
    assert g.canary.stats()["late_compiles"] > before


def test_launches_that_waited_for_a_compiler_are_told(monkeypatch):
    """Once each, with the seconds; what compiles before the start is done, or takes no time, is nobody's business."""
    late = LateCompiles()
    for place in ("guard.start_up", "guard.reporting.reader", "guard.reading"):
        monkeypatch.setattr(f"canary_core.{place}.LATE", late)
    g = Padded()
    late.note("check_kernel", 3.0)
    g.canary.warm_up(g.padding, most_rows=2)
    late.note("check_kernel", 2.5)
    late.note("record_kernel", 0.01)
    g.engine.submit("a", list(range(5, 25)))
    g.step(3)
    g.canary.drain()
    (event,) = g.findings.told("compiled_late")
    assert (event.fields["kernel"], event.fields["seconds"]) == ("check_kernel", 2.5)
    assert g.canary.stats()["late_compiles"] == 1


def test_compiling_together_ends_with_what_it_compiles(monkeypatch):
    """An error among the launches gets out, and neither our launches nor what the engine compiles stays in a mode
    that nobody ends."""
    current = ContextVar("current", default=None)

    class Mode:
        def __init__(self, executor):
            pass

        def __enter__(self):
            current.set(self)

        def __exit__(self, *error):
            assert launch._instead.get() is not None

    def launches():
        raise ValueError("no such kernel")

    monkeypatch.setattr(launch.triton, "AsyncCompileMode", Mode, raising=False)
    with pytest.raises(ValueError, match="no such kernel"):
        launch.compile_together(launches)
    assert current.get() is None
    assert launch._instead.get() is None
    free = []

    def try_it():
        free.append(launch._compiling.acquire(blocking=False))
        launch._compiling.release()

    other = Thread(target=try_it)
    other.start()
    other.join()
    assert free == [True]


class Kernel:
    """Notes what is done with it; has nothing else of what kernels of the Tritons that we know have."""

    def __init__(self):
        self.done = []

    def warmup(self, *args, **options):
        self.done.append("compiled")

    def __getitem__(self, grid):
        return lambda *args, **options: self.done.append("launched")


def test_other_threads_launch_while_one_compiles_together(monkeypatch):
    """What they meet for the first time is launched and not only compiled."""
    state = Padded(backend="torch").canary.states["full"]
    mine, theirs = Kernel(), Kernel()
    launchers = [launch.Launcher(kernel, state, (), {}, num_warps=4) for kernel in (mine, theirs)]

    def launches():
        launchers[0]((1, 1))
        other.start()

    other = Thread(target=launchers[1], args=((1, 1),))
    monkeypatch.setattr(launch.triton, "AsyncCompileMode", lambda threads: nullcontext(), raising=False)
    launch.compile_together(launches)
    other.join()
    assert (mine.done, theirs.done) == (["compiled"], ["launched"])


def test_a_triton_that_can_not_be_asked_what_it_compiles_compiles_here():
    """No other process is started, nothing was launched, and the next launch is a launch."""

    state, kernel = Padded(backend="torch").canary.states["full"], Kernel()
    launcher = launch.Launcher(kernel, state, (), {}, num_warps=4)
    assert launch.compile_beside(lambda: launcher((1, 1)), []) is None
    assert kernel.done == []
    launcher((1, 1))
    assert kernel.done == ["launched"]


@pytest.mark.gpu
def test_after_a_warm_up_nothing_is_compiled_for_states():
    """Be they of few requests or of many, in prefills or decodes."""
    states = torch.randn(64, 4096, device="cuda")
    source = KVSource(states, "ssm", 0, chunk_bytes=1 << 14, slot_stride_bytes=1 << 14, dtype=torch.float32)
    region = Region("mamba", 64, (source,), RegionKind.STATE, null_slot=0)
    canary = Canary([region], CanaryConfig(mode="raise", state_interval=1), hooks=private_hooks())

    def batch(rows: int, prefix: int, new: int, slot: int = 1) -> BatchView:
        none = torch.zeros(rows, dtype=torch.int32, device="cuda")
        tokens = torch.arange(rows * max(new, 1), device="cuda")
        table = SlotTable(torch.arange(rows, device="cuda")[:, None] * slot + slot, ring_slots=1)
        writers = torch.arange(rows, dtype=torch.int32, device="cuda")
        return BatchView(none + prefix, none + new, tokens, writers, {"mamba": table})

    canary.warm_up(lambda rows: [batch(rows, 0, 0, slot=0)], most_rows=40)
    before = compiled()
    for rows in (3, 40):
        for prefix, new in ((0, 7), (7, 1), (8, 1)):
            forward = batch(rows, prefix, new)
            canary.step.before(forward)
            states += 1
            canary.step.after(forward)
            canary.step.end()
    canary.drain()
    assert compiled() == before
