"""Compares nodes of a prefix cache in host memory with the records sent there with their bytes.

All of this runs on the host and reads no device. The bytes are compared later, on loading: see `hicache`.
"""

from collections.abc import Sequence

import torch

from canary_adapters import FIRST_CONTENT
from canary_sglang.prefix_cache.tree import Broken
from canary_sglang.prefix_cache.walk import HostRun
from canary_sglang.transfer.hicache import ParkedRecords

RULE = "host"


def check_host_nodes(parked: ParkedRecords, runs: Sequence[HostRun], vocabulary: int) -> tuple[list[Broken], int]:
    """The first contradiction of each run (a host slot that does not exist, is free, or was written for another token
    or position), and the number of host slots compared with a record. Tokens from ``vocabulary`` on, such as the hash
    of an image, are not compared."""
    if not runs:
        return [], 0
    lengths = torch.tensor([len(run.slots) for run in runs], device="cpu")
    place = torch.repeat_interleave(torch.arange(len(runs), device="cpu"), lengths)
    begins = lengths.cumsum(0) - lengths
    position = (
        torch.arange(len(place), device="cpu")
        + (torch.tensor([run.first for run in runs], device="cpu") - begins)[place]
    )
    numbers, tokens = torch.cat([run.slots for run in runs]), torch.cat([run.tokens for run in runs])

    inside = (numbers >= 0) & (numbers < parked.slots)
    slots = torch.where(inside, numbers, 0)
    stored = parked.records(slots)
    known = inside & stored.known & stored.written
    judged = (tokens < vocabulary) & (stored.tokens < FIRST_CONTENT)
    other = known & ((stored.positions != position) | (judged & (stored.tokens != tokens)))
    free = inside & ~parked.host_pool.slot_used[slots]

    found: dict[int, Broken] = {}
    for entry in (~inside | free | other).nonzero()[:, 0].tolist():
        index = int(place[entry])
        if index in found:
            continue
        if not inside[entry]:
            what = f"does not exist; there are {parked.slots}"
        elif free[entry]:
            what = "is in the host pool's free list as well"
        else:
            alike = int(stored.tokens[entry]) == int(tokens[entry])
            there = f"the node's token, but at {int(stored.positions[entry])}" if alike else "another token"
            what = f"was written for {there}"
        detail = f"host slot {int(numbers[entry])}, which holds its position {int(position[entry])}, {what}"
        found[index] = Broken(runs[index].node, RULE, detail)
    return list(found.values()), int(known.sum())
