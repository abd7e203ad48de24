"""No speed without equality: a case's ops, run by the kernels and by the torch reference, must leave the same bits."""

import sys
from pathlib import Path

import torch

from benchmarks.setting import Setting
from canary_core.ops.backends import Backend, torch_backend, triton_backend
from canary_core.ops.state import RegionState
from canary_core.records import TOKEN, Counter

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # the comparison is the tests' own

from ops.scenario import differences, twin

FAULTS = 5
"""Slots whose record or bytes are changed in the second run."""


class NotEqualError(Exception):
    """Kernels and reference differ, or a clean case raised findings: the case has no speed."""


def require_equal(setting: Setting, kernels: Backend | None = None) -> None:
    """Compares after every op of the case's step, on its clean data and then with faults planted in it. The setting
    stays as it was. Raises `NotEqualError`."""
    kernels = kernels or triton_backend()
    clean = _compare(setting, kernels, twin(setting.forwards[0].state), "clean data")
    if clean:
        raise NotEqualError(f"{setting.case.name}: {clean} findings on clean data")
    faulty = twin(setting.forwards[0].state)
    slots = _victims(setting)
    faulty.records[slots, TOKEN] ^= 1
    _flip(setting, slots)
    try:
        _compare(setting, kernels, faulty, "faulty data")
    finally:
        _flip(setting, slots)


def require_quiet(setting: Setting) -> None:
    """After timing: nothing was reported and nothing suspected, so that what was timed is what clean traffic costs.
    Raises `NotEqualError`."""
    counters = setting.state.shared.counters
    found, unsure = int(counters[: Counter.FIRST].sum()), int(counters[Counter.UNSURE])
    if found or unsure:
        raise NotEqualError(f"{setting.case.name}: {found} findings, {unsure} suspicions in the timed launches")


def _compare(setting: Setting, kernels: Backend, state: RegionState, what: str) -> int:
    """Runs the step on ``state`` with the reference; gives the findings."""
    reference, forward = torch_backend(), setting.forwards[0]
    for op in setting.case.step:
        other = twin(state)
        forward.on(state, reference, op)
        forward.on(other, kernels, op)
        wrong = differences(state, other, forward.batch.tokens)
        if wrong:
            names = ", ".join(wrong)
            raise NotEqualError(f"{setting.case.name}: {op} differs from its reference on {what}, in {names}")
    return int(state.shared.counters[: Counter.FIRST].sum())


def _victims(setting: Setting) -> torch.Tensor:
    rows = setting.forwards[0].rows
    slots = setting.traffic.slots[rows].reshape(-1)
    generator = torch.Generator().manual_seed(1)
    chosen = torch.randperm(len(slots), generator=generator)[:FAULTS]
    return slots[chosen.to(slots.device)]


def _flip(setting: Setting, slots: torch.Tensor) -> None:
    """Flips a bit of some slots' first byte in the first source, and of some entries of the list that attention was
    given; a second call flips it back."""
    setting.forwards[0].given[: len(slots)] ^= 1
    if not setting.case.has_bytes:
        return
    source = setting.state.region.sources[0]
    page, inside = slots // source.page_size, slots % source.page_size
    at = source.offset_bytes + page * source.page_stride_bytes + inside * source.slot_stride_bytes
    source.tensor.view(torch.uint8).view(-1)[at] ^= 1
