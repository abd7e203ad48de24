"""The byte oracle: which bytes of the storage change when torch itself writes one slot, against KVSource's formula."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from canary_core.region import KVSource


class Oracle:
    """Byte offsets from the start of the tensor's storage."""

    def written(self, tensor: Tensor, slot: Tensor) -> set[int]:
        """Bytes that change when every element of the view ``slot`` of ``tensor`` is written."""
        storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        storage.zero_()
        slot.copy_(torch.ones(tensor.element_size(), dtype=torch.uint8).view(tensor.dtype)[0])
        return set(storage.nonzero().flatten().tolist())

    def named(self, source: KVSource, slot: int) -> set[int]:
        """Bytes that the formula of DESIGN names for a slot."""
        page, i = divmod(slot, source.page_size)
        if source.present is not None and i >= source.present:
            return set()
        start = source.tensor.data_ptr() - source.tensor.untyped_storage().data_ptr() + source.offset_bytes
        start += page * source.page_stride_bytes + i * source.slot_stride_bytes
        return {
            start + c * source.chunk_stride_bytes + b for c in range(source.chunks) for b in range(source.chunk_bytes)
        }

    def agrees(self, source: KVSource, slots: dict[int, Tensor]) -> None:
        """Asserts that each slot's view is exactly the bytes the source names, and that a byte is named once."""
        for slot, view in slots.items():
            named = self.named(source, slot)
            assert self.written(source.tensor, view) == named
            assert len(named) == source.slot_bytes

    def affine(self, tensor: Tensor, slot: Tensor) -> bool:
        """Whether the bytes of one slot are equal runs at equal distances."""
        written = sorted(self.written(tensor, slot))
        starts = [b for b in written if b - 1 not in set(written)]
        ends = [b for b in written if b + 1 not in set(written)]
        lengths = {end - start for start, end in zip(starts, ends, strict=True)}
        gaps = {b - a for a, b in pairwise(starts)}
        return len(lengths) == 1 and len(gaps) <= 1


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    """Independent of the code under test: torch's own indexing, and the formula spelled out."""
    return Oracle()


@pytest.fixture(scope="session")
def refusal() -> Callable[..., None]:
    """``refusal(call, *facts)``: the call raises `AttachError` whose message holds each fact."""
    from canary_core.errors import AttachError

    def check(call: Callable[[], object], *facts: object) -> None:
        with pytest.raises(AttachError) as caught:
            call()
        message = str(caught.value)
        missing = [fact for fact in facts if str(fact) not in message]
        assert not missing, f"{missing} not in: {message}"

    return check
