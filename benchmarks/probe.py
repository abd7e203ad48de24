"""``python -m benchmarks.probe``: what a probe of the alarm takes from the engine's thread. A CPU is enough.

A probe is asked for at a read of the counters (`AlarmTest.step`), and its row is decoded, grouped and handed to the
thread of incidents when it has come (`AlarmTest.came`). On a GPU the request is one launch, of a fill of 8 bytes, more.
"""

import time
from collections.abc import Callable

import torch

from canary_core import BatchView, Canary, CanaryConfig, KVSource, Region, SlotTable
from canary_core.guard.reporting import alarm_test
from canary_kit.quiet import unheard

LAYERS, SLOTS, ROUNDS = 32, 4096, 2000


def main() -> None:
    """Prints CPU time of the thread a call, in µs."""
    with unheard():
        times = measure()
    for name, taken in times.items():
        print(f"{name:28}{taken * 1e6:8.2f} µs")  # noqa: T201


def measure() -> dict[str, float]:
    """Seconds of each part."""
    config = CanaryConfig.load(mode="log", silence_s=0, stats_interval=0, scrub_budget="1MiB")
    pools = [torch.zeros(SLOTS, 64) for _ in range(2 * LAYERS)]
    sources = tuple(KVSource(pool, "kv"[i % 2], i // 2, 256, 256) for i, pool in enumerate(pools))
    canary = Canary([Region("kv", SLOTS, sources)], config)
    findings = canary._findings
    alarm, rows = findings.alarm, list[list[int]]()
    swallow, findings._swallow = findings._swallow, lambda row: rows.append([*row])  # type: ignore[method-assign]
    batch = prefill(256)
    while not rows:
        canary.step.run(lambda: None, lambda: batch)
    # From here on each call asks at once.
    alarm_test.AGAIN_S = alarm_test.LEAST_S = alarm_test.MOST_S = 0.0

    def came() -> None:
        alarm._due = 0.0
        swallow([*rows[0]])

    alarm._due = None
    spent = {"asked for": each(lambda: alarm.step(time.monotonic(), scrubs=True, captured=False))}
    alarm_test.AGAIN_S = 1e9
    spent["a read in which none is due"] = each(lambda: alarm.step(time.monotonic(), scrubs=True, captured=False))
    spent["came: decoded, grouped"] = each(came)
    canary.close()
    return spent


def each(call: Callable[[], object]) -> float:
    """CPU time of this thread a call, the fastest of five rounds."""
    best = float("inf")
    for _ in range(5):
        begin = time.thread_time()
        for _ in range(ROUNDS):
            call()
        best = min(best, (time.thread_time() - begin) / ROUNDS)
    return best


def prefill(tokens: int) -> BatchView:
    """One request that writes ``tokens`` slots."""
    slots = torch.arange(tokens)
    lengths = torch.tensor([0]), torch.tensor([tokens])
    tables = {"kv": SlotTable(slots[None], write_slots=slots)}
    return BatchView(*lengths, torch.zeros(tokens, dtype=torch.int64), torch.zeros(1, dtype=torch.int32), tables)


if __name__ == "__main__":
    main()
