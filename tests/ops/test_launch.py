"""How a compiled kernel is launched: past Triton's own Python, where its C function is known."""

from types import SimpleNamespace

import pytest

from canary_core.ops.kernels import launch

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
