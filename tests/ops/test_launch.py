"""How a compiled kernel is launched: past Triton's own Python, where its C function is known."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from canary_core.ops.kernels import check, fingerprint_record, launch, read_check, record

METADATA = (4, 1, 0)


class CudaLauncher:
    """As Triton 3.6's: ``launch`` is its C function."""

    launch_cooperative_grid, launch_pdl, profile_scratch_size = False, True, 0

    def __init__(self, scratch_bytes: int = 0) -> None:
        self.global_scratch_size = scratch_bytes
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    def launch(self, *given: object) -> None:
        """The C function."""
        self.calls.append(("c", given))

    def __call__(self, *given: object) -> None:
        """Triton's own way."""
        self.calls.append(("python", given))


@pytest.mark.parametrize(("known", "scratch_bytes", "expected"), [
    (True, 0, ("c", (1, 2, 1, 7, 8, False, True, None, None, METADATA, None, None, None, 9))),
    (False, 0, ("python", (1, 2, 1, 7, 8, METADATA, None, None, None, 9))),
    (True, 64, ("python", (1, 2, 1, 7, 8, METADATA, None, None, None, 9))),
])  # fmt: skip
def test_a_kernel_is_launched_past_tritons_python_only_where_that_is_known(monkeypatch, known, scratch_bytes, expected):
    """Not in another release, nor where a kernel wants memory of Triton's allocator."""
    monkeypatch.setattr(launch, "KNOWN_LAUNCHER", known)
    run = CudaLauncher(scratch_bytes)
    how, head = launch._launch_of(SimpleNamespace(run=run, packed_metadata=METADATA))
    how(1, 2, 1, 7, 8, *head, 9)
    assert run.calls == [expected]


class Fields(NamedTuple):
    """Some arguments of a kernel."""

    p_slots: Any
    rows: Any


def test_members_of_a_tuple_are_inspected_as_arguments_are():
    """A compiled kernel gets addresses and numbers in the tuple's place, and is another one where Triton would compile
    another: for no tensor, for a 1, for another alignment."""
    aligned = torch.zeros(64, dtype=torch.int32)
    assert aligned.data_ptr() % 16 == 0
    given = launch.arguments(Fields(aligned, 48), 5)
    assert given.raw == [(aligned.data_ptr(), 48), 5]
    assert given.objects == (Fields(aligned, 48), 5)
    assert launch.arguments(Fields(torch.zeros(64, dtype=torch.int32), 64), 9).kind == given.kind
    others = [Fields(None, 48), Fields(aligned, 1), Fields(aligned, 47), Fields(aligned[1:], 48), Fields(48, aligned)]
    assert len({launch.arguments(fields, 5).kind for fields in others} | {given.kind}) == 6


@pytest.mark.parametrize("kernel", [
    check.check_kernel, record.record_kernel, read_check.read_check_kernel,
    fingerprint_record.fingerprint_record_kernel,
])  # fmt: skip
def test_numbers_that_vary_are_arguments_by_themselves(kernel):
    """Of a tuple's members Triton compiles a 1 in, whatever it is told: a batch of one row would compile anew."""
    assert set(launch.VARYING) <= set(kernel.arg_names)
