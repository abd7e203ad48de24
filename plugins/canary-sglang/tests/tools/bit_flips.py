"""Flipped bits in what an engine's pools hold, and enough traffic for the guard to come by."""

import random
from collections.abc import Callable
from typing import Any

import torch

from canary_core import testing
from canary_core.config import ScrubBudget
from canary_core.records import (
    PAYLOAD_RECORD,
    PAYLOAD_STAMP,
    POSITION,
    STATES,
    STEP_WRITTEN,
    TOKEN,
    UNPARKED,
    State,
)
from canary_core.region import RegionKind
from tools.inspection import findings
from tools.traffic import decoding, flush, serve


def flip(engine: Any, region: str, source: str, seed: int, among: list[int] | None = None) -> int:
    """Flips one bit of a slot that holds something; gives the slot."""
    state = engine.states[region]
    written = among or (state.records[:, POSITION] & UNPARKED == State.WRITTEN).nonzero()[:, 0].tolist()
    rng = random.Random(seed)
    slot = rng.choice([s for s in written if s])
    _flip_bit(next(s for s in state.sources if s.name == source), slot, rng)
    return int(slot)


def flip_in_host_memory(engine: Any, source: str, seed: int) -> int:
    """Flips one bit of a slot in HiCache's host memory whose records came with it, early in its prompt, so that
    whoever has that prompt again reads it; gives the host slot."""
    rng = random.Random(seed)
    (parked,) = (
        records
        for way in engine.session.canary.step.listeners
        if isinstance(getattr(way, "_parked", None), dict)
        for records in way._parked.values()
    )
    early = (parked._table[:, PAYLOAD_RECORD] >> 32) // STATES < 30
    used = parked.host_pool.slot_used & (parked._table[:, PAYLOAD_STAMP] != 0) & early
    slot = rng.choice(used.nonzero()[:, 0].tolist())
    half, layer = source.split(".")
    content = getattr(parked.host_pool, f"{half}_buffer")[int(layer)][slot].view(torch.uint8).view(-1)
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return int(slot)


def scribble_within_a_forward(engine: Any, prompt: list[int]) -> int:
    """Serves a prompt. In its prefill the store of the last layer also changes a byte of what the first layer has just
    stored; gives the slot."""
    pool = engine.runner.token_to_kv_pool
    last = engine.runner.model_config.num_hidden_layers - 1
    methods = [name for name in ("set_kv_buffer", "set_mla_kv_buffer") if hasattr(pool, name)]
    slots: list[int] = []

    def make(name: str) -> Callable[..., None]:
        def store(layer: Any, where: Any, *args: Any, **kwargs: Any) -> None:
            getattr(type(pool), name)(pool, layer, where, *args, **kwargs)
            if layer.layer_id == last and not slots:
                slot = int(getattr(where, "loc", where)[0])
                part, index = pool, 0
                if hasattr(pool, "layers_mapping"):
                    index, in_window = pool.layers_mapping[0]
                    part = pool.swa_kv_pool if in_window else pool.full_kv_pool
                    slot = int(pool.full_to_swa_index_mapping[slot]) if in_window else slot
                buffers = part.k_buffer if hasattr(part, "k_buffer") else part.kv_buffer
                buffers[index][slot].view(torch.uint8).view(-1)[1] ^= 4
                slots.append(slot)

        return store

    for name in methods:
        setattr(pool, name, make(name))
    try:
        serve(engine, [prompt], 4)
    finally:
        for name in methods:
            delattr(pool, name)
    return slots[0]


def flip_and_scrub(engine: Any, region: str, source: str, seed: int) -> int:
    """Flips a bit and serves until the scrub has gone all round; gives the slot. One that was free and is written
    again by then shows nothing, so another one is taken."""
    records = engine.states[region].records
    engine.session.canary.slots.settle()
    if not (records[:, POSITION] & UNPARKED == State.WRITTEN).any():
        # Without a prefix cache only a running request has KV.
        engine.submit(list(range(3, 43)), 30)
        for _ in range(4):
            engine.step()
    for attempt in range(20):
        before = records[:, STEP_WRITTEN].clone()
        slot = flip(engine, region, source, seed + 100 * attempt)
        scrub(engine, [9, 8, 7])
        if records[slot, STEP_WRITTEN] == before[slot]:
            return slot
    raise RuntimeError("no slot stays as it is")


def flip_running(engine: Any, prompt: list[int], region: str, source: str, seed: int) -> dict[str, Any]:
    """Flips one bit of what a running request will read, of a token close to its end, and serves on; gives the
    slot and our findings since. Ends with an empty cache."""
    from canary_sglang.compat.schedulers import table_row

    (request,) = decoding(engine, [prompt], 8)
    state = engine.states[region]
    about = state.region
    position = len(prompt) - 3
    position -= (position + 1) % about.tokens_per_slot
    row, _ = table_row(engine.scheduler, request)
    slot = int(row[position])
    slot = slot // about.tokens_per_slot if about.slot_map is None else int(about.slot_map[slot])
    if about.kind is RegionKind.RING:
        # Its newest row: that of a token close to the end may be another's by now.
        words = state.records[:, POSITION]
        slot = int(torch.where(words & UNPARKED == State.WRITTEN, words & ~State.PARKED, -1).argmax())
    _flip_bit(next(s for s in state.sources if s.name == source), slot, random.Random(seed))
    while not request.finished():
        engine.step()
    scrub(engine, [9, 8, 7])
    found = findings(engine)["violations"]
    flush(engine)
    return {"slot": slot, "violations": found}


def rot(engine: Any, prompt: list[int], region: str, source: str) -> dict[str, Any]:
    """Serves ``prompt``, then flips a bit of a slot that the prefix cache holds of it; gives the slot and what was
    served."""
    served = serve(engine, [prompt], 4)
    written = _of_prompt(engine, region, prompt)
    return {**served, "slot": flip(engine, region, source, 1, [written[len(written) // 2]])}


def rot_running(engine: Any, prompts: list[list[int]], region: str, source: str) -> dict[str, Any]:
    """Serves the prompts together and, once all are decoding, flips a bit of the last one's own KV; gives how each
    ended."""
    served = decoding(engine, prompts, 30)
    return _serve_on(engine, served, flip(engine, region, source, 1, [_of_prompt(engine, region, prompts[-1])[-1]]))


def rot_running_state(engine: Any, prompts: list[list[int]], source: str) -> dict[str, Any]:
    """As `rot_running`, of the last one's recurrent state."""
    from canary_sglang.compat import schedulers

    served = decoding(engine, prompts, 30)
    slot = schedulers.state_slot(engine.scheduler, served[-1])
    return _serve_on(engine, served, flip(engine, "mamba", source, 1, [slot]))


def _serve_on(engine: Any, served: list[Any], slot: int) -> dict[str, Any]:
    while not all(r.finished() for r in served):
        engine.step()
    return {
        "slot": slot,
        "requests": [r.rid for r in served],
        "outputs": [list(r.output_ids) for r in served],
        "reasons": [r.finished_reason.to_json() for r in served],
    }


def scrub(engine: Any, prompt: list[int]) -> None:
    """Steps of a small request until the scrub has gone all round: one lists all that is written, the next compares
    it."""
    scrubs = [canary.step.scrub for canary in engine.canaries]
    budgets = [scrub.budget for scrub in scrubs]
    for scrub in scrubs:
        scrub.budget = ScrubBudget.parse("1TiB")
        scrub.adjust(captured=False)
    serve(engine, [prompt], 3)
    for scrub, budget in zip(scrubs, budgets, strict=True):
        scrub.budget = budget
        scrub.adjust(captured=False)


def _of_prompt(engine: Any, region: str, prompt: list[int]) -> list[int]:
    """Slots in which the prompt's last tokens are, by position."""
    records = engine.session.canary.states[region].records
    found: list[int] = []
    for position, token in list(enumerate(prompt))[-12:]:
        here = (records[:, POSITION] & UNPARKED - STATES == position * STATES + State.WRITTEN) & (
            records[:, TOKEN] == token
        )
        found += here.nonzero()[:, 0].tolist()
    return found


def _flip_bit(source: Any, slot: int, rng: random.Random) -> None:
    where = torch.tensor([slot], device=source.tensor.device)
    content = testing.read_bytes(source, where)
    content[0, rng.randrange(source.slot_bytes)] ^= 1 << rng.randrange(8)
    testing.write_bytes(source, where, content)
