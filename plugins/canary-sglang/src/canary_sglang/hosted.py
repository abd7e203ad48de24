"""Nodes of a prefix cache that are in host memory, against the records that went there with their bytes.

All of it is on the host: no device is asked, and no byte of KV is read, which the load does (see `hicache`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from canary_core.records import POSITION, STATES, TOKEN, State
from canary_sglang.hicache import ParkedRecords
from canary_sglang.tree import Broken
from canary_sglang.walk import HostRun

RULE = "host"


def check_hosted(parked: ParkedRecords, runs: Sequence[HostRun], vocabulary: int) -> tuple[list[Broken], int]:
    """The first contradiction of each run: a host slot that does not exist, is free, or was written for another token
    or position; and how many host slots were compared with a record. Tokens of ``vocabulary`` and above, such as the
    hash of an image, are not judged."""
    found = []
    compared = 0
    for run in runs:
        inside = (run.slots >= 0) & (run.slots < parked.slots)
        slots = torch.where(inside, run.slots, 0)
        known, records = parked.records(slots)
        position = torch.arange(run.first, run.first + len(slots))
        token, stored_token = run.tokens, records[:, TOKEN].long()
        known &= inside & (records[:, POSITION] & (int(State.FREED) - 1) == State.WRITTEN)
        stored_position = records[:, POSITION].long() // STATES
        judged = token < vocabulary
        other = known & ((stored_position != position) | (judged & (stored_token != token)))
        free = inside & ~parked.host_pool.slot_used[slots]
        compared += int(known.sum())
        entry = _first(~inside | free | other)
        if entry is None:
            continue
        detail = f"host slot {int(run.slots[entry])}, which holds its position {int(position[entry])}, "
        if not inside[entry]:
            detail += f"does not exist; there are {parked.slots}"
        elif free[entry]:
            detail += "is in the host pool's free list as well"
        else:
            detail += (
                f"was written for token {int(stored_token[entry])} at {int(stored_position[entry])}, the node's is "
                f"{int(token[entry])}"
            )
        found.append(Broken(run.node, RULE, detail))
    return found, compared


def _first(mask: Tensor) -> int | None:
    return int(mask.int().argmax()) if bool(mask.any()) else None
