"""One case: equality, then our time, then the built-in's."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks.cases import FINGERPRINTS, STORES, Case
from benchmarks.equality import NotEqualError, require_equal, require_quiet
from benchmarks.gather import gather_us
from benchmarks.peer import Modules, Peer, PeerUnavailableError
from benchmarks.setting import Forward, Setting
from benchmarks.timing import time_graph
from canary_core.ops.backends import Backend, triton_backend

LAUNCHES = 16
"""Launches in one graph, at least, where a launch may be repeated."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a case gave. ``refused``: why it has no speed. ``resident_us``: the same launch again and again on one batch
    that fits the L2 cache. ``gather_us``: reading the same rows and nothing else, see `gather`. ``peer_us``: the
    built-in's launches by name, per batch; ``peer_note``: why it has none."""

    name: str
    work: str
    bytes: int = 0
    us: float = 0.0
    low_us: float = 0.0
    high_us: float = 0.0
    gbps: float = 0.0
    resident_us: float | None = None
    gather_us: float | None = None
    bar: str = ""
    met: bool | None = None
    peer_us: dict[str, float] = field(default_factory=dict)
    peer_note: str = ""
    refused: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times slower the built-in is, with one lane."""
        return sum(self.peer_us.values()) / self.us if self.peer_us and self.us else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure(case: Case, modules: Modules | None, budget_s: float) -> Result:
    """Builds ``case`` on the GPU, compares kernels and reference, and only if they agree takes times."""
    setting = Setting.make(case, torch.device("cuda"))
    try:
        require_equal(setting)
        timing = time_graph(*timed(setting, triton_backend()), budget_s)
        resident_us = _resident_us(setting, budget_s)
        require_quiet(setting)
    except NotEqualError as error:
        return Result(case.name, case.work, bar=str(case.bar or ""), refused=str(error))
    size = setting.floor_bytes
    gbps = size / timing.us / 1000
    peer_us, peer_note = _peer(setting, modules, budget_s) if modules and case.peer else ({}, "")
    gathers = case.ops == ("read_check",) and not setting.state.sources.sums
    return Result(
        case.name,
        case.work,
        bytes=size,
        us=timing.us,
        low_us=timing.low_us,
        high_us=timing.high_us,
        gbps=gbps,
        resident_us=resident_us,
        gather_us=gather_us(setting, budget_s) if gathers else None,
        bar=str(case.bar or ""),
        met=case.bar.met(timing.us, gbps) if case.bar else None,
        peer_us=peer_us,
        peer_note=peer_note,
    )


def timed(setting: Setting, backend: Backend) -> tuple[Callable[[], None], int, Callable[[], None] | None]:
    """What is timed of a case: a function that launches its ops, how often it does so, and what has to be done before
    each call of it."""
    case = setting.case
    if {*FINGERPRINTS, "record", *STORES} & set(case.ops):
        setting.plan(backend)
    once = bool({*FINGERPRINTS} & set(case.ops))  # its slots must be unwritten before each launch
    rounds = 1 if once else -(-LAUNCHES // case.shape.sets)
    launch = _launcher(case, backend, setting.forwards * rounds)
    return launch, case.shape.sets * rounds, setting.reset if once else None


def _resident_us(setting: Setting, budget_s: float) -> float | None:
    case = setting.case
    cache_bytes = torch.cuda.get_device_properties(setting.device).L2_cache_size
    if {*FINGERPRINTS} & set(case.ops) or setting.floor_bytes > 0.7 * cache_bytes:
        return None
    launch = _launcher(case, triton_backend(), setting.forwards[:1] * LAUNCHES)
    return time_graph(launch, LAUNCHES, None, budget_s / 2).us


def _launcher(case: Case, backend: Backend, forwards: list[Forward]) -> Callable[[], None]:
    def launch() -> None:
        for forward in forwards:
            for op in case.ops:
                forward.run(backend, op)

    return launch


def _peer(setting: Setting, modules: Modules, budget_s: float) -> tuple[dict[str, float], str]:
    try:
        peer = Peer(setting, modules)
        times = {}
        for op in setting.case.peer:
            launch, launches = peer.launcher(op)
            times[op] = time_graph(launch, launches, None, budget_s / 2).us
        peer.require_clean()
    except PeerUnavailableError as error:
        return {}, str(error)
    except Exception as error:  # nvcc, a missing header: whatever it is, our own numbers stand
        return {}, f"the built-in failed: {error!r}"
    return times, ""
