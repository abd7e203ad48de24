"""A Canary plugin for `pd.py` and `hicache.py`: writes down what is found and told, and breaks what the case asks for.

``PD_FOLDER`` has ``control``, the case, and gets ``<PD_SIDE>.jsonl``, a line for each finding and event.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch

from canary_core import testing
from canary_core.plugins.hookspecs import hookimpl
from canary_core.records import PAYLOAD_RECORD, PAYLOAD_STAMP, STATES

FOLDER, SIDE = Path(os.environ.get("PD_FOLDER", ".")), os.environ.get("PD_SIDE", "")
_broken: set[str] = set()


def control() -> list[str]:
    """Number and words of the case that is running."""
    return FOLDER.joinpath("control").read_text().split()


def tell(line: dict[str, Any]) -> None:
    """Appends a line."""
    with FOLDER.joinpath(f"{SIDE}.jsonl").open("a") as file:
        file.write(json.dumps({"case": control()[0], **line}, default=str) + "\n")


def first_time() -> bool:
    """Whether this case has not broken anything yet."""
    case = control()[0]
    fresh = case not in _broken
    _broken.add(case)
    return fresh


@hookimpl
def canary_attached(canary: Any) -> None:
    """Stands between the engine and its sender on the prefill side, and its receiver on the decode side."""
    if SIDE != "prefill":
        if not torch.cuda.is_available():
            import host_copies

            host_copies.install()
        if SIDE == "decode":
            fail_some()
        return
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager

    original = NixlKVManager.send_kvcache
    if getattr(original, "witness", False):
        return

    def send(manager: Any, peer: str, pages: Any, ptrs: Any, there: Any, *args: Any, **kwargs: Any) -> Any:
        case = control()[1]
        if case == "truncate" and first_time():
            pages, there = pages[:-1], there[:-1]
            tell({"broken": case})
        elif case == "swap" and first_time():
            there = there[::-1].copy()
            tell({"broken": case})
        return original(manager, peer, pages, ptrs, there, *args, **kwargs)

    send.witness = True
    NixlKVManager.send_kvcache = send


def fail_some() -> None:
    """In the case ``stress`` one of four transfers ends as failed where it had succeeded."""
    from sglang.srt.disaggregation.nixl import conn

    original = conn.NixlKVReceiver.poll

    def poll(receiver: Any) -> Any:
        status = original(receiver)
        fails = status == conn.KVPoll.Success and receiver.bootstrap_room % 4 == 0 and control()[1] == "stress"
        return conn.KVPoll.Failed if fails else status

    conn.NixlKVReceiver.poll = poll


@hookimpl
def canary_recorded(canary: Any, batch: Any) -> None:
    """On the prefill side, flips a bit of the last token's slot after its forward was recorded: ``corrupt REGION
    SOURCE``."""
    words = control()
    if words[1] == "flip_host":
        flip_host(words[2])
    if words[1] == "misuse" and words[2] == SIDE:
        misuse(batch)
    if SIDE != "prefill" or words[1] != "corrupt" or batch.tokens < 8 or not first_time():
        return
    region, source = canary.regions[words[2]], words[3]
    slot = batch.tables[words[2]].write_slots[-1:].long()
    if region.slot_map is not None:
        slot = region.slot_map[slot].long()
    where = next(s for s in canary.states[words[2]].sources if s.name == source)
    content = testing.read_bytes(where, slot)
    content[0, 1] ^= 1
    testing.write_bytes(where, slot, content)
    if slot.is_cuda:
        torch.cuda.synchronize()
    tell({"broken": "corrupt", "slot": int(slot)})


def misuse(batch: Any) -> None:
    """On the prefill side, the engine's allocator gets a page back twice; on the decode side, one that a request will
    read on."""
    from canary_sglang.hooks import HOOKS

    allocator = HOOKS.session.runner.token_to_kv_pool_allocator
    allocator = getattr(allocator, "full_attn_allocator", allocator)
    if (batch.tokens > 8 and SIDE == "decode") or not first_time():
        return
    if SIDE == "decode":
        size = allocator.page_size
        page = batch.tables["full"].write_slots[:1].long() // size
        slots = page * size + torch.arange(size, device=page.device)
    else:
        slots = allocator.alloc(allocator.page_size).clone()
        allocator.free(slots)
    allocator.free(slots)
    tell({"broken": "misuse", "slot": int(slots[0])})


def flip_host(source: str) -> None:
    """Flips a bit of a slot in HiCache's host memory whose records came with it."""
    from canary_sglang.transfer import hicache

    (cache,) = hicache._ATTACHED
    parked = cache._parked.get("full")
    if parked is None or not first_time():
        return
    early = (parked._table[:, PAYLOAD_RECORD] >> 32) // STATES < 30
    used = parked.host_pool.slot_used & (parked._table[:, PAYLOAD_STAMP] != 0) & early
    slot = int(used.nonzero()[0])
    half, layer = source.split(".")
    content = getattr(parked.host_pool, f"{half}_buffer")[int(layer)][slot].view(torch.uint8).view(-1)
    content[1] ^= 1
    tell({"broken": "flip_host", "host_slot": slot, "counts": cache.counts})


@hookimpl
def canary_violation(violation: Any) -> None:
    """A finding."""
    tell({"violation": violation.fields()})


@hookimpl
def canary_event(event: Any) -> None:
    """Everything else."""
    tell({"event": event.name, **event.fields})
