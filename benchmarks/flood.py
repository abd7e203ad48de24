"""``python -m benchmarks.flood``: costs of very many findings of one cause, in time of the engine's thread and in host
memory. On the CPU, with rows as a device's ring holds them."""

import argparse
import gc
import time

import torch
from rich.console import Console

from benchmarks.ledger_age import resident_bytes
from canary_core import Canary, CanaryConfig, KVSource, Region, Writers
from canary_core.guard.reporting.readback import HostRead
from canary_core.plugins import private_hooks
from canary_core.records import Kind, Phase, Row, State

READ = 1024
"""Rows of one read, the default of ``CANARY_RING_ROWS``."""

SLOTS = 4096


def guard() -> Canary:
    """A guarded pool of one source."""
    pool = torch.zeros(SLOTS, 64, dtype=torch.int32, device="cpu")
    region = Region("full", SLOTS, (KVSource(pool, "k", 0, chunk_bytes=256, slot_stride_bytes=256),))
    config = CanaryConfig.load(mode="log", silence_s=0, log_level="error", diagnose=False)
    return Canary([region], config, hooks=private_hooks(), writers=Writers())


def read_of(first: int, writer: int) -> HostRead:
    """A read of changed bytes, no two alike, in slots that one request wrote, each step a read."""
    numbers = torch.arange(first, first + READ, dtype=torch.int64, device="cpu")
    rows = torch.zeros(READ, len(Row), dtype=torch.int64, device="cpu")
    rows[:, Row.SEQUENCE] = numbers + 1
    rows[:, Row.KIND] = int(Kind.BYTES)
    rows[:, Row.STEP] = (10 + first // READ) * 8 + int(Phase.SCRUB)
    rows[:, Row.SLOT] = numbers % SLOTS
    rows[:, Row.POSITION] = rows[:, Row.TOKEN] = rows[:, Row.WRITER] = rows[:, Row.FREED] = -1
    rows[:, Row.STORED_POSITION] = numbers % SLOTS * 32 + int(State.WRITTEN)
    rows[:, Row.STORED_WRITER], rows[:, Row.STEP_WRITTEN] = writer, 4
    rows[:, Row.STORED_VALUE], rows[:, Row.FOUND_VALUE] = numbers * 7919 + 1, numbers << 20 | 1
    listed: list[list[int]] = rows.tolist()
    return HostRead([0] * 256, listed, 0, None)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--findings", type=int, default=1_000_000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    say = Console(width=120, highlight=False).print
    canary = guard()
    reporter, writer = canary._findings, canary._findings.writers.id("a")
    gc.collect()
    before, cpu, longest = resident_bytes(), 0.0, 0.0
    for first in range(0, given.findings, READ):
        read = read_of(first, writer)
        began = time.thread_time()
        reporter.open(read, canary.forwards)
        spent = time.thread_time() - began
        cpu, longest = cpu + spent, max(longest, spent)
    gc.collect()
    grown = (resident_bytes() - before) / 1e6
    cost = cpu / given.findings * 1e6
    say(f"{given.findings:,} findings, {len(canary.incidents)} open incidents: {cost:.1f} µs a finding")
    say(f"longest read of {READ}: {longest * 1e3:.1f} ms; host memory grew by {grown:.1f} MB")
    say({name: number for name, number in canary.stats().items() if number})


if __name__ == "__main__":
    main()
