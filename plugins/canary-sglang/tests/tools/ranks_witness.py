"""A Canary plugin for `engines.ranks_script`: breaks one rank's memory on demand, and writes down what each rank does.

``RANKS_FOLDER`` has ``control``, what to break in rank 1, or ``lost`` for a lost write in each rank, and gets
``rank<N>.jsonl``: a line for each forward, finding and event of rank N. `unguard` is a plugin of SGLang's own:
``RANKS_UNGUARDED`` has what the process of rank 1 is to find in its environment, as a JSON object.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from canary_core import hook_manager, testing
from canary_core.plugins.hookspecs import hookimpl
from canary_core.records import POSITION, STATES, UNPARKED, WRITER, State

FOLDER = Path(os.environ.get("RANKS_FOLDER", "."))
BROKEN_RANK = 1
_ranks: list[int] = []
_done: set[str] = set()


@hookimpl
def canary_attached(canary: Any) -> None:
    """From here on it is known which rank this is."""
    _ranks.append(number(canary))


@hookimpl
def canary_recorded(canary: Any, batch: Any) -> None:
    """One forward: what it was about; then ``control`` may want something broken."""
    read = (batch.prefix_lens, batch.new_lens, batch.token_ids, batch.tables["full"].write_slots)
    content = [tensor.tolist() for tensor in read]
    tell({"forward": hashlib.sha256(json.dumps(content).encode()).hexdigest()})
    wanted = FOLDER.joinpath("control").read_text()
    if wanted == "lost" and wanted not in _done:
        _done.add(wanted)
        hook_manager().register(testing.FaultInjector.parse("lost_write", seed=3))
    if number(canary) != BROKEN_RANK or wanted in _done:
        return
    rows = canary.writers.name(int(batch.writers[-1])), int(batch.prefix_lens.shape[0])
    slots = victims(canary, batch, wanted.split()[-1])
    if slots:
        _done.add(wanted)
        spoil(canary.states["full"].sources[-1], slots[0])
        tell({"broken": wanted, "slot": slots[0], "request": rows[0]})


def unguard() -> None:
    """As if rank 1 were on another machine, where the environment is another one. SGLang's processes know their rank
    by an argument of the function that they begin with."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and "tp_rank" not in frame.f_locals:
        frame = frame.f_back
    if frame is not None and frame.f_locals["tp_rank"] == BROKEN_RANK:
        os.environ.update(json.loads(os.environ["RANKS_UNGUARDED"]))


def number(canary: Any) -> int:
    """Of this process: there are two, ranks of one replica or replicas of one rank."""
    return int(canary.config.rank + canary.config.replica)


def victims(canary: Any, batch: Any, wanted: str) -> list[int]:
    """Slots to choose from, with the token at position 10: ``cached`` by a request that is over, or written by the last
    one of those that are decoding (``running``), or none."""
    records = canary.states["full"].records
    written = records[:, POSITION] & UNPARKED - STATES == 10 * STATES + State.WRITTEN
    last = records[:, WRITER] == batch.writers[-1]
    if wanted == "cached":
        return [int(s) for s in (written & ~last).nonzero()[:, 0]]
    if wanted == "running" and set(batch.new_lens.tolist()) == {1} and int(batch.prefix_lens.min()) > 10:
        return [int(s) for s in (written & last).nonzero()[:, 0]]
    return []


def spoil(source: Any, slot: int) -> None:
    """Small numbers become huge ones: whoever reads them says something else."""
    where = torch.tensor([slot], device=source.tensor.device)
    content = testing.read_bytes(source, where)
    content[0, 1::2] ^= 0x40
    testing.write_bytes(source, where, content)


def tell(line: dict[str, Any]) -> None:
    """Appends a line."""
    if _ranks:
        with FOLDER.joinpath(f"rank{_ranks[-1]}.jsonl").open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")


@hookimpl
def canary_violation(violation: Any) -> None:
    """A finding."""
    tell({"violation": violation.fields()})


COUNTED = ("ranks_", "recompute", "attention_", "parked_")


@hookimpl
def canary_event(event: Any) -> None:
    """Everything else; of the counts those of ranks that are compared, and of requests that are computed again."""
    if event.name != "stats":
        tell({"event": event.name, **event.fields})
    elif counts := {name: count for name, count in event.fields.items() if name.startswith(COUNTED)}:
        tell({"compared": counts})
