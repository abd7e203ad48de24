"""``python -m benchmarks.flood``: costs of very many findings of one cause, in time of the engine's thread and in host
memory. On the CPU, with rows as a device's ring holds them. ``--transformers 200``: `generate()` of a small Llama with
so many findings in each step, and without, by turns: CPU time of the engine's thread, in all and of the findings alone.
The budget comes back by that time, too, as by the clock on a machine that does nothing else."""

import argparse
import gc
import statistics
import time
import types
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import torch
from rich.console import Console

from benchmarks.ledger_age import resident_bytes
from canary_core import Canary, CanaryConfig, KVSource, Region, Writers
from canary_core.guard.reporting import budget
from canary_core.guard.reporting.findings import Reporter
from canary_core.guard.reporting.readback import HostRead
from canary_core.plugins import private_hooks
from canary_core.records import Kind, Phase, Row, State

READ = 1024
"""Rows of one read, the default of ``CANARY_RING_ROWS``."""

SLOTS = 4096

TURNS, NEW = 3, 128
"""Calls of `generate` with a flood, and as many without; new tokens of each."""


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


def generate(findings: int, say: Callable[[str], object]) -> None:
    """Prints the thread's CPU time of a token, without and with so many findings in each step, by turns, and of reading
    them."""
    from canary_transformers import guard as guard_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8, vocab_size=32000
        )
    ).eval()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    reading = {False: 0.0, True: 0.0}
    flood = False
    with guard_model(model, log_level="error") as guarded, torch.inference_mode():
        prompt = torch.randint(3, 32000, (1, 64))
        model.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
        opened, rows = Reporter.open, iter([[0]])

        def flooded(reporter: Reporter, read: HostRead, forwards: int) -> None:
            more = islice(rows, findings) if flood else ()
            read = replace(read, rows=[*read.rows, *more])
            began = time.thread_time()
            opened(reporter, read, forwards)
            reading[flood] += time.thread_time() - began

        Reporter.open = flooded  # type: ignore[method-assign]
        budget.time = types.SimpleNamespace(monotonic=time.thread_time)  # type: ignore[assignment]
        budget.PROCESS.fill()
        for turn in range(2 * TURNS):
            flood = bool(turn % 2)
            reads = range(0, (NEW + 8) * findings, READ)
            rows = iter([row for first in reads for row in read_of(first, 0).rows])
            began = time.thread_time()
            model.generate(prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
            seconds[flood].append(time.thread_time() - began)
        Reporter.open = opened  # type: ignore[method-assign]
    del guarded
    without, beside = (statistics.median(seconds[how]) / NEW * 1e3 for how in (False, True))
    rate = findings / beside * 1e3
    say(f"{without:.2f} ms a token without, {beside:.2f} ms with {rate:.0f} findings/s: {beside / without - 1:+.1%}")
    cost = (reading[True] - reading[False]) / TURNS / NEW * 1e3
    say(f"of these the findings: {cost:.2f} ms a token, {cost / without:.1%}")


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--findings", type=int, default=1_000_000)
    parser.add_argument("--transformers", type=int, metavar="FINDINGS", help="in a step of generate()")
    given = parser.parse_args()
    torch.set_num_threads(1)
    say = Console(width=120, highlight=False).print
    if given.transformers:
        generate(given.transformers, say)
        return
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
