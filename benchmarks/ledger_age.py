"""``python -m benchmarks.ledger_age``: how much the ledger can't judge any more after millions of evicted blocks, what
host memory it takes, and what a kept block costs the host. On the CPU, without an engine."""

import argparse
import time
from pathlib import Path

import torch
from rich.console import Console

from canary_core.watchers.ledger.table import Table

AGES = (3.6, 8.0, 16.0, 32.0, 64.0)
"""Millions of evicted blocks."""
BATCH = 1024
FRESH = 50_000
_PAGE_BYTES = 4096


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def age(table: Table, sources: int, evicted: int) -> float:
    """Enters blocks of prefixes that are all different until so many were evicted; gives seconds of CPU a block."""
    values = torch.randint(-(1 << 62), 1 << 62, (BATCH, sources))
    blocks, spent = 0, 0.0
    while table.evicted < evicted:
        hashes = torch.randint(-(1 << 63), (1 << 63) - 1, (BATCH,))
        begin = time.process_time()
        table.add(hashes, hashes * 3, values)
        spent += time.process_time() - begin
        blocks += BATCH
    return spent / max(blocks, 1)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="CANARY_LEDGER")
    parser.add_argument("--sources", type=int, default=64)
    parser.add_argument("--most", type=float, default=AGES[-1], help="millions of evicted blocks")
    given = parser.parse_args()
    say = Console(width=120, highlight=False).print
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.inference_mode():
        fresh = torch.randint(-(1 << 63), (1 << 63) - 1, (FRESH,))
        before = resident_bytes()
        table = Table(given.sources, given.mib << 20)
        say(f"{given.mib} MiB, {given.sources} sources: room for {table.capacity} blocks")
        say("| evicted, M | can't be judged | ledger_doubt_ratio | resident MiB | µs a block |\n|---|---|---|---|---|")
        for millions in (0.0, *(one for one in AGES if one <= given.most)):
            cost = age(table, given.sources, int(millions * 1e6) or 1)
            wrong = float(table.doubt.has(fresh).float().mean())
            taken = (resident_bytes() - before) >> 20
            say(f"| {millions} | {wrong:.2%} | {table.doubt.ratio():.2%} | {taken} | {cost * 1e6:.2f} |")


if __name__ == "__main__":
    main()
