"""Recurrent states: what a decode step of a hybrid model costs where its states are looked at, and on average.

Each step rewrites all bytes of its requests' states, so a look reads them once to fingerprint them and once more
before the next forward. By arithmetic, at 4.15 TB/s: 64 requests of Qwen3-Next's shape (36 layers of 2 MiB and 48 KiB)
are 4.9 GB, so either pass is 1.2 ms. Measured on an H200 (torch 2.11, triton 3.6, commit efd0125): 1.25 ms to
fingerprint and 1.26 ms to compare by the tile that is kept (`kernels.tiles.LONG_TILE`); history/tuning.md has others.
Both passes for one decode of 256 (``CANARY_STATE_INTERVAL``) are 0.01 ms a step by arithmetic; to each step come the
launches for the mapping and for marking bytes as not known.
"""

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.timing import time_graph
from canary_core import BatchView, Canary, CanaryConfig, KVSource, Region, RegionKind, SlotTable

REGION = "mamba"
CONTEXT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class States:
    """``rows`` requests, each with a state of ``ssm_bytes`` and ``conv_bytes`` in each of ``layers``; a pool has room
    for ``spare_slots`` more."""

    rows: int
    layers: int
    ssm_bytes: int
    conv_bytes: int
    spare_slots: int = 0

    @property
    def state_bytes(self) -> int:
        """Of all requests."""
        return self.rows * self.layers * (self.ssm_bytes + self.conv_bytes)


QWEN3_NEXT = States(64, 36, ssm_bytes=2 << 20, conv_bytes=48 << 10)


class Decode:
    """Decodes of all requests, again and again, under a Canary that looks at every ``interval``-th. Nothing rewrites
    the bytes: what is timed is the same, and no lost write is suspected, since of those nothing is known before."""

    def __init__(self, shape: States, interval: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.shape = shape
        slots = 1 + shape.rows + shape.spare_slots
        self._slots = (torch.randperm(slots - 1, device=device)[: shape.rows] + 1)[:, None]
        self._region = Region(REGION, slots, _sources(shape, slots, device), RegionKind.STATE, null_slot=0)
        config = CanaryConfig(
            mode="raise",
            profile="watch",
            bytes="all",
            scrub_budget="0",
            state_interval=interval,
            log_level="warning",
            non_finite=False,
        )
        self.canary = Canary([self._region], config)
        self._state = self.canary.states[REGION]
        self._state.fingerprints.zero_()  # the pool is full already, and no forward lost a write
        self._prefix_lens = torch.zeros(shape.rows, dtype=torch.int32, device=device)
        self._positions = torch.zeros(shape.rows, dtype=torch.int64, device=device)
        first = self._batch(CONTEXT_TOKENS)
        self.canary.step.before(first)
        self.canary.step.after(first)
        self._advance(CONTEXT_TOKENS)
        self._known = self._state.records.clone(), self._state.fingerprints.clone()
        self.batch = self._batch(1)

    def step(self) -> None:
        """The next decode, checked and recorded."""
        self.canary.step.before(self.batch)
        self.canary.step.after(self.batch)
        self.canary.step.end()
        self._advance(1)

    def pre(self) -> None:
        """The checks of the first decode after the prefill."""
        self.canary.step.before(self.batch)
        self.canary.step.abandon()

    def post(self) -> None:
        """The records of that decode, whose check ran in another graph."""
        self.canary.step._forward.issue_record(self.batch)

    def as_prefilled(self, known_bytes: bool = True) -> None:
        """What is known of the states is what the prefill left."""
        records, fingerprints = self._known
        self._state.records.copy_(records)
        self._state.fingerprints.copy_(fingerprints if known_bytes else torch.zeros_like(fingerprints))

    def before_post(self) -> None:
        """As `as_prefilled`, and checked."""
        self.as_prefilled(known_bytes=False)
        self.pre()

    def _advance(self, tokens: int) -> None:
        self._prefix_lens += tokens
        self._positions += tokens

    def _batch(self, new: int) -> BatchView:
        rows, device = self.shape.rows, self._slots.device
        positions = self._positions if new == 1 else torch.arange(new, device=device).repeat(rows)
        return BatchView(
            prefix_lens=self._prefix_lens,
            new_lens=torch.full_like(self._prefix_lens, new),
            token_ids=torch.randint(0, 1000, (rows * new,), device=device),
            writers=torch.arange(rows, dtype=torch.int32, device=device),
            tables={REGION: SlotTable(self._slots, ring_slots=1)},
            positions=positions,
        )


def measure(shape: States = QWEN3_NEXT, budget_s: float = 0.5) -> dict[str, Any]:
    """Device µs of the hooks around a decode that is looked at, and of the average decode with the default interval."""
    looked = Decode(shape, 1, torch.device("cuda"))
    pre = time_graph(looked.pre, 1, looked.as_prefilled, budget_s)
    post = time_graph(looked.post, 1, looked.before_post, budget_s)
    looked.canary.drain()
    looked.canary.close()
    del looked
    interval = CanaryConfig().state_interval
    usual = Decode(shape, interval, torch.device("cuda"))
    average = _average_us(usual, interval)
    usual.canary.drain()
    usual.canary.close()
    return {
        "shape": f"{shape.rows} requests × {shape.layers} layers × ({shape.ssm_bytes} + {shape.conv_bytes}) B",
        "bytes": shape.state_bytes, "interval": interval, "compare_us": pre.us, "fingerprint_us": post.us,
        "average_us": average, "gbps": 2 * shape.state_bytes / (pre.us + post.us) / 1000,
    }  # fmt: skip


def _average_us(decode: Decode, interval: int) -> float:
    """Of three rounds of ``interval`` steps each, after one to warm up; the device is kept waiting at their start, so
    that the host is ahead of it."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(interval):
        decode.step()
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    start.record()
    for _ in range(3 * interval):
        decode.step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000 / (3 * interval)


def _sources(shape: States, slots: int, device: torch.device) -> tuple[KVSource, ...]:
    sources = []
    for layer in range(shape.layers):
        for half, size in (("conv", shape.conv_bytes), ("ssm", shape.ssm_bytes)):
            rows = torch.empty(slots, size // 4, device=device).normal_()
            sources.append(KVSource(rows, half, layer, chunk_bytes=size, slot_stride_bytes=size, dtype=rows.dtype))
    return tuple(sources)
