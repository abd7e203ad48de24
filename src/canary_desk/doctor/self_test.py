"""A self-test in seconds: a guarded toy pool on one device, broken on purpose in four ways to be found."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from canary_core.batch import BatchView, SlotTable
from canary_core.config import CanaryConfig
from canary_core.errors import error_text
from canary_core.guard.canary import Canary
from canary_core.plugins.discovery import new_manager
from canary_core.records import Kind
from canary_core.region import KVSource, Region
from canary_core.runtime.writers import Writers
from canary_kit.findings import Findings

SLOTS, LAYERS, ROW_ELEMENTS, TOKENS = 256, 4, 64, 24

LIMIT_S = 5.0
"""Most time after the first forward, which may compile kernels."""


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """Result of one fault. ``expected``: the kind to be found, None for none. ``found``: the kinds found, each once;
    ``seconds`` until then. ``error``: a failure of Canary itself."""

    what: str
    expected: str | None
    found: tuple[str, ...]
    seconds: float
    error: str | None = None

    @property
    def passed(self) -> bool:
        """Whether the fault was found, or nothing where there was none."""
        return self.error is None and (self.expected in self.found if self.expected else not self.found)


class ToyPool:
    """K and V of `LAYERS` layers on ``device``, and one request that gets a token with each forward. The pool is
    guarded with ``settings``; ``heard`` keeps its findings and events."""

    def __init__(self, device: torch.device, **settings: object) -> None:
        self.device = device
        shape = (SLOTS, ROW_ELEMENTS)
        self.kv = {
            (half, layer): torch.zeros(shape, dtype=torch.bfloat16, device=device)
            for layer in range(LAYERS)
            for half in "kv"
        }
        row = ROW_ELEMENTS * 2
        sources = tuple(KVSource(t, half, layer, row, row, dtype=t.dtype) for (half, layer), t in self.kv.items())
        self.heard = Findings()
        manager = new_manager()
        manager.register(self.heard)
        # Nobody's environment: the test is the same everywhere.
        config = CanaryConfig.load(
            mode="log",
            profile="watch",
            silence_s=0,
            stats_interval=0,
            metrics="off",
            control="off",
            incident_dir="",
            faults="",
            **settings,
        )
        self.writers = Writers()
        region = Region("toy", SLOTS, sources, null_slot=0)
        self.canary = Canary([region], config, hooks=manager, writers=self.writers)
        self.table = torch.zeros(1, SLOTS, dtype=torch.int32, device=device)
        order = torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(0)) + 1
        self.slots = order.to(device=device, dtype=torch.int32)
        self.length = 0
        self.skip_store: tuple[str, int] | None = None

    def forward(self, tokens: int = 1) -> None:
        """One forward of so many new tokens."""
        self.table[0, self.length : self.length + tokens] = self.slots[self.length : self.length + tokens]
        view = BatchView(
            prefix_lens=self._tensor([self.length]),
            new_lens=self._tensor([tokens]),
            token_ids=self._tensor(list(range(5, 5 + tokens))),
            writers=self._tensor([self.writers.id("self-test")]),
            tables={"toy": SlotTable(self.table)},
        )
        self.canary.step.run(lambda: self._store(tokens), lambda: view)

    def _store(self, tokens: int) -> None:
        slots = self.slots[self.length : self.length + tokens].long()
        for key, tensor in self.kv.items():
            if key != self.skip_store:
                values = torch.randn(tokens, ROW_ELEMENTS, device=self.device)
                tensor[slots] = values.to(tensor.dtype)
        self.length += tokens

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def flip(pool: ToyPool) -> None:
    """One bit of one layer's V, in the slot of the third token."""
    bits = pool.kv["v", LAYERS - 1].view(torch.int16)
    bits[pool.slots[2].long(), 7] ^= 1 << 4


def misdirect(pool: ToyPool) -> None:
    """The table's entry of the second token names the slot of the fifth."""
    pool.table[0, 1] = pool.slots[4]


def lose(pool: ToyPool) -> None:
    """One layer's K is not stored any more."""
    pool.skip_store = ("k", 1)


FAULTS: tuple[tuple[str, Callable[[ToyPool], None] | None, Kind | None, dict[str, object]], ...] = (
    ("no fault", None, None, {"read_check": -1, "scrub_budget": "64MiB"}),
    ("a flipped bit, compared before it is read", flip, Kind.BYTES, {"read_check": -1, "scrub_budget": "0"}),
    ("a flipped bit, found by the scrub", flip, Kind.BYTES, {"scrub_budget": "64MiB"}),
    ("a wrong entry of the slot table", misdirect, Kind.POSITION, {"scrub_budget": "0"}),
    ("a store that never happens", lose, Kind.LOST_WRITE, {"scrub_budget": "0"}),
)
"""Damage, expected kind, and settings for a certain finding."""


def run(device: torch.device) -> list[FaultOutcome]:
    """All of `FAULTS` on ``device``; never raises."""
    return [_one(device, *fault) for fault in FAULTS]


def _one(
    device: torch.device,
    what: str,
    fault: Callable[[ToyPool], None] | None,
    expected: Kind | None,
    settings: dict[str, object],
) -> FaultOutcome:
    name = None if expected is None else expected.name.lower()
    try:
        pool = ToyPool(device, **settings)
        pool.forward(TOKENS)
        pool.forward()
        pool.canary.drain()
        # By now all is compiled.
        began = time.monotonic()
        if fault is not None:
            fault(pool)
        for _ in range(8):
            pool.forward()
            pool.canary.drain()
            if pool.heard.violations or time.monotonic() - began > LIMIT_S:
                break
        took = time.monotonic() - began
        pool.canary.close()
    except Exception as error:
        return FaultOutcome(what, name, (), 0.0, error_text(error))
    found = tuple(dict.fromkeys(v.kind.name.lower() for v in pool.heard.violations))
    errors = pool.heard.told("disabled")
    return FaultOutcome(what, name, found, took, str(errors[0].fields.get("error")) if errors else None)
