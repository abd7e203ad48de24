"""Canary as a whole: what one forward costs on the device and on the host, how many launches, how much memory."""

import gc
import statistics
import time
from collections import Counter as Tally
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch

from benchmarks.cases import TOGETHER, Case, Shape
from benchmarks.equality import require_equal, require_quiet
from benchmarks.setting import REGION, Setting, Traffic, region
from benchmarks.timing import time_graph
from canary_core import Canary, CanaryConfig, KVSource, Overlap, Region
from canary_core.ops.state import RegionState, Shared

SCRUB = "16MiB"
OPS = ("check", TOGETHER, "scrub")
DECODE = Case(
    "step/decode-64", "whole pre_forward and post_forward: decode of 64 × 1024, 32 layers × K+V × 2048 B, scrub 16 MiB",
    OPS, Shape(64, 1024, sets=2, layers=32), layout="llama", scrub_bytes=16 << 20, quick=True,
)  # fmt: skip
PREFILL = Case(
    "step/prefill-8192", "the same for a prefill of 8192 tokens", OPS, Shape(1, 0, 8192, sets=4, layers=32),
    layout="llama", scrub_bytes=16 << 20,
)  # fmt: skip
STEPS = {case.name: case for case in (DECODE, PREFILL)}

CURVE = Case(
    "curve", "decode, one layer of FP8 K+V, scrub 16 MiB", OPS, Shape(8, 1000), layout="fp8",
    scrub_bytes=16 << 20,
)  # fmt: skip
POOL_SLOTS = (10_000, 100_000, 1_000_000, 4_000_000)
CONTEXT_TOKENS = (1_000, 8_000, 64_000, 256_000, 1_000_000)
CONTEXT_POOL_SLOTS = 1_050_000
PROFILED_STEPS = 12
HOST_STEPS = 200
AVERAGED = 4
HOST_BATCH = 20
"""Steps between two waits, outside the clock: the launch queue must not fill up."""


class Step:
    """A Canary with its default settings and a fixed scrub, guarding the pool of ``case``; ``mode`` as in
    ``CANARY_MODE``: one that raises proves that nothing is found, one that logs is what engines run. Both have the
    profile ``watch``: a mode that raises alone would look at much more."""

    def __init__(self, case: Case, device: torch.device, mode: Literal["log", "raise"] = "raise") -> None:
        torch.manual_seed(0)
        traffic = Traffic.random(case, device)
        config = CanaryConfig(
            mode=mode, profile="watch", scrub_budget=SCRUB, read_check=0, bytes="all", log_level="warning"
        )
        self.canary = Canary([region(case, traffic)], config)
        self.canary.sampled.follow()
        self.canary.states[REGION].fingerprints.zero_()  # the pool is full already, and no forward lost a write
        self.canary.step.end()  # sets the scrub's length
        self.setting = Setting(case, traffic, self.canary.states[REGION])

    def pre(self) -> None:
        """Every batch's checks."""
        for forward in self.setting.forwards:
            self.canary.step.before(forward.batch)
            self.canary.step.abandon()

    def whole(self) -> None:
        """Every batch's checks and records."""
        for forward in self.setting.forwards:
            self.canary.step.before(forward.batch)
            self.canary.step.after(forward.batch)

    def times(self, budget_s: float) -> dict[str, Any]:
        """Device µs of one forward's hooks. Raises `NotEqualError`, and `ViolationError` for a false alarm."""
        require_equal(self.setting)
        sets = len(self.setting.forwards)
        pre = time_graph(self.pre, sets, None, budget_s)
        whole = time_graph(self.whole, sets, self.setting.reset, budget_s)
        self.canary.drain()
        require_quiet(self.setting)
        return {
            "pre_us": pre.us, "post_us": whole.us - pre.us, "whole_us": whole.us, "bytes": self.setting.floor_bytes,
        }  # fmt: skip

    def host_us(self, served: bool) -> dict[str, float]:
        """The host's time in each hook of one forward while the device is busy: medians of averages over
        `AVERAGED` forwards; ``all_p90`` is of single forwards. ``pre_forward``: all that comes before `Step.after`.
        ``one_mm``, one call of `torch.mm`, says how fast the host is.

        ``served``: as engines run their decodes, with default settings and `Overlap.NEXT`; else with a scrub after each
        forward, and `Overlap.ALL`."""
        self.canary.step.scrub.budget = CanaryConfig().scrub_budget if served else self.canary.config.scrub_budget
        overlap = Overlap.NEXT if served else Overlap.ALL
        batch, clock = self.setting.forwards[0].batch, time.perf_counter
        busy = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
        out = torch.empty_like(busy)
        hooks: dict[str, list[float]] = {"pre_forward": [], "post_forward": [], "end_step": []}
        calls: list[float] = []
        step, marks = self.canary.step, list[float]()
        recorder, end_step = step._forward, step.end
        record = recorder.record

        def forward() -> None:
            marks.append(clock())
            torch.mm(busy, busy, out=out)
            marks.append(clock())

        def marked(call: Callable[..., None]) -> Callable[..., None]:
            return lambda *given: (marks.append(clock()), call(*given))[1]

        # The step's own calls, with the time at which each begins.
        recorder.record, step.end = marked(record), marked(end_step)  # type: ignore[method-assign]
        for i in range(HOST_STEPS + HOST_BATCH):
            if i % HOST_BATCH == 0:
                torch.cuda.synchronize()
                torch.mm(busy, busy, out=out)
            marks.clear()
            start = clock()
            step.run(forward, lambda: batch, overlap=overlap)
            end = clock()
            begun, forwarded, checked, recorded = marks
            if i >= HOST_BATCH:
                calls.append((forwarded - begun) * 1e6)
                seconds = (begun - start + checked - forwarded, recorded - checked, end - recorded)
                for values, value in zip(hooks.values(), seconds, strict=True):
                    values.append(value * 1e6)
        recorder.record, step.end = record, end_step  # type: ignore[method-assign]
        taken = {**hooks, "all": [sum(values) for values in zip(*hooks.values(), strict=True)], "one_mm": calls}
        medians = {
            name: statistics.median(statistics.mean(values[i : i + AVERAGED]) for i in range(0, len(values), AVERAGED))
            for name, values in taken.items()
        }
        return {**medians, "all_p90": sorted(taken["all"])[len(taken["all"]) * 9 // 10]}

    def launches(self) -> dict[str, float]:
        """Device operations of one forward's hooks by name, kernels and copies alike, as the profiler sees them."""
        from torch._C._autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        batch = self.setting.forwards[0].batch
        self.setting.reset()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            for _ in range(PROFILED_STEPS):
                self.canary.step.before(batch, Overlap.ALL)
                self.canary.step.after()
                self.canary.sampled.give(batch.token_ids[: batch.rows])
                self.canary.step.end()
            torch.cuda.synchronize()
        on_device = (e for e in profiled.events() if e.device_type == DeviceType.CUDA)
        tally = Tally(str(e.name).split("(")[0][:60] for e in on_device)
        return {name: count / PROFILED_STEPS for name, count in tally.most_common()}


def curves(budget_s: float) -> dict[str, list[dict[str, Any]]]:
    """Device µs of one forward's hooks against pool size and against context. A point whose equality fails says so
    instead."""
    points: dict[str, list[dict[str, Any]]] = {"pool_slots": [], "context_tokens": []}
    for slots in POOL_SLOTS:
        shape = CURVE.shape
        used = shape.rows * (shape.context_tokens + shape.new_tokens) + 1
        points["pool_slots"].append({"x": slots, **_point(replace(shape, spare_slots=slots - used), budget_s)})
    for context in CONTEXT_TOKENS:
        shape = Shape(1, context, spare_slots=CONTEXT_POOL_SLOTS - context - 2)
        points["context_tokens"].append({"x": context, **_point(shape, budget_s)})
    return points


def _point(shape: Shape, budget_s: float) -> dict[str, Any]:
    try:
        return _point_times(shape, budget_s)
    except Exception as error:  # one point that fails must not cost the others
        return {"refused": repr(error)}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def _point_times(shape: Shape, budget_s: float) -> dict[str, Any]:
    whole = Step(replace(CURVE, shape=shape), torch.device("cuda"))
    times = whole.times(budget_s)
    whole.canary.close()
    return times


def memory(slots: int = 1_000_000) -> dict[str, Any]:
    """Device memory of ours for a Llama-8B pool of ``slots`` slots: everything a Canary allocates, on torch's meta
    device, which has shapes and sizes but no bytes, so neither the pool (131 GB) nor our part is really there."""
    meta = torch.device("meta")
    sources: list[KVSource] = []
    for layer in range(32):
        for half in "kv":
            rows = torch.empty(slots, 1024, dtype=torch.bfloat16, device=meta)
            sources.append(KVSource(rows, half, layer, chunk_bytes=2048, slot_stride_bytes=2048, dtype=rows.dtype))
    config = CanaryConfig(bytes="all", read_check=0)
    guarded = Region(REGION, slots, tuple(sources), null_slot=0)
    shared = Shared.allocate(config, meta)
    state = RegionState(guarded, 0, shared, config)
    ours = state.memory_bytes + sum(t.numel() * t.element_size() for t in (shared.counters, shared.clock, shared.ring))
    return {
        "slots": slots, "pool_bytes": guarded.pool_bytes, "our_bytes": ours, "share": ours / guarded.pool_bytes,
        "peer_bytes": 128 * slots, "bar": "≤ 1 %", "met": ours <= 0.01 * guarded.pool_bytes,
    }  # fmt: skip
