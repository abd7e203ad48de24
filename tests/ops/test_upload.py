"""`upload`: numbers and tensors of the host on a device."""

import pytest
import torch

from canary_core.ops.upload import upload

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
@pytest.mark.parametrize("values", [[], [1, 0, 1]])
def test_numbers_become_a_tensor_of_the_asked_type(values, dtype):
    """One dimension, as `torch.tensor` makes it, also of no numbers."""
    torch.testing.assert_close(upload(values, CPU, dtype), torch.tensor(values, dtype=dtype), rtol=0, atol=0)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.int64, 63), (torch.int32, 31)])
def test_the_whole_range_of_a_type_is_kept(dtype, bits):
    """Hash anchors use all 64 bits; -1 stands for nobody."""
    values = [-(1 << bits), -1, (1 << bits) - 1]
    assert upload(values, CPU, dtype).tolist() == values


def test_a_tensor_keeps_its_type_and_shape():
    """Rows of records are sent as they are."""
    rows = torch.arange(6, dtype=torch.int16).view(2, 3)
    assert torch.equal(upload(rows, CPU), rows)
    assert upload(rows, CPU).dtype == torch.int16
