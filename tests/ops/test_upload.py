"""`upload`: numbers and tensors of the host on a device."""

from array import array

import pytest
import torch

from canary_core.ops.upload import number_array, upload

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


@pytest.mark.parametrize("code", ["q", "i"])
@pytest.mark.parametrize("values", [[], range(3), [5, -1, 7] * 400, array("i", [1, 2]), array("q", [-3])])
def test_an_array_of_numbers_is_a_copy_of_its_own(values, code):
    """Of lists, ranges and arrays: what is appended to it later is nowhere else."""
    made = number_array(values, code)
    assert (made.typecode, list(made)) == (code, list(values))
    made.append(9)
    assert list(values) != list(made)


def test_a_tensor_keeps_its_type_and_shape():
    """Rows of records are sent as they are."""
    rows = torch.arange(6, dtype=torch.int16).view(2, 3)
    assert torch.equal(upload(rows, CPU), rows)
    assert upload(rows, CPU).dtype == torch.int16
