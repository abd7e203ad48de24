"""Device times: medians of CUDA-graph replays between events."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

SPIN_CYCLES = 400_000
"""About 0.2 ms on the device before the first event, so that the graph is queued when the clock starts."""
MOST_REPLAYS = 200
FEWEST_REPLAYS = 5
SLOW_MS = 100
"""A graph that takes longer is replayed once, after one replay outside the clock."""
PEAK_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one launch: median in µs, and the 10th and 90th percentile of the replays."""

    us: float
    low_us: float
    high_us: float
    replays: int


def time_graph(
    launch: Callable[[], object], launches: int, prepare: Callable[[], object] | None = None, budget_s: float = 0.5
) -> Timing:
    """Captures ``launch``, which does the work ``launches`` times, and replays the graph for about ``budget_s``, at
    least `FEWEST_REPLAYS` times (see `SLOW_MS`). ``prepare`` runs before each replay, outside the clock. Both run
    uncaptured first, so that everything is compiled and loaded."""
    prepare = prepare or (lambda: None)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        prepare()
        launch()
        prepare()
        stream.synchronize()
        first = _clocked(launch)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # thread_local: the built-in's kernels may be compiling in other threads.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        launch()
    count = 1
    if first < SLOW_MS:
        count = max(FEWEST_REPLAYS, min(MOST_REPLAYS, int(budget_s * 1000 / max(first, 0.05))))
    times = []
    for _ in range(1 + count):
        prepare()
        torch.cuda._sleep(SPIN_CYCLES)
        times.append(_clocked(graph.replay))
    del graph
    samples = sorted(t * 1000 / launches for t in times[1:])
    tenth = len(samples) // 10
    return Timing(statistics.median(samples), samples[tenth], samples[-1 - tenth], count)


def peak_read_gbps(size_bytes: int = PEAK_BYTES) -> dict[str, float]:
    """The two ceilings, measured now: reading (`torch.sum`, of all at once or of eighths, whichever is faster) and
    copying (bytes read plus bytes written)."""
    data = torch.randn(size_bytes // 4, device="cuda")
    out = torch.empty((), device="cuda")
    half, eighths = data.numel() // 2, data.chunk(8)
    whole = time_graph(lambda: torch.sum(data, dim=0, out=out), 1)
    parts = time_graph(lambda: [torch.sum(part, dim=0, out=out) for part in eighths], 1)
    copy = time_graph(lambda: data[:half].copy_(data[half:]), 1)
    return {"read_gbps": size_bytes / min(whole.us, parts.us) / 1000, "copy_gbps": size_bytes / copy.us / 1000}


def _clocked(work: Callable[[], object]) -> float:
    """Milliseconds of ``work`` on the current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
