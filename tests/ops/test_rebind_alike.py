"""A cache that is made anew by every forward: `SlotEvents.rebind_alike` against `SlotEvents.rebind`."""

from dataclasses import replace
from weakref import ref

import pytest
import torch
from torch import Tensor

from canary_adapters import Part, growing_source
from canary_core import Canary, CanaryConfig, KVSource, Placement, Region

ROOM, ROWS, HEADS, DIM = 16, 2, 3, 8


def tensors(tokens: int, layers: int = 4) -> list[Tensor]:
    """K and V of each layer, all alike."""
    return [torch.randn(ROWS, HEADS, tokens, DIM) for _ in range(2 * layers)]


def sources(found: list[Tensor]) -> tuple[KVSource, ...]:
    """One for each."""
    halves = [Part("kv"[i % 2], i // 2) for i in range(len(found))]
    return tuple(growing_source(tensor, part, ROOM) for tensor, part in zip(found, halves, strict=True))


def guarded(found: list[Tensor], **settings: object) -> Canary:
    """A Canary on them."""
    return Canary([Region("full", ROWS * ROOM, sources(found))], CanaryConfig.load(**settings))


def places(found: list[Tensor]) -> list[Placement]:
    """Where the first K and V are."""
    return [
        Placement(s.page_stride_bytes, s.slot_stride_bytes, s.chunk_stride_bytes, s.present_slots)
        for s in sources(found[:2])
    ]


def state(canary: Canary) -> object:
    """The region's."""
    return canary.states["full"]


def test_it_gives_what_rebind_gives() -> None:
    """The same descriptors and sources, forward after forward, and back."""
    canary, other = guarded(tensors(3)), guarded(tensors(3))
    for tokens in (4, 5, 9):
        found = tensors(tokens)
        other.slots.rebind("full", sources(found))
        assert canary.slots.rebind_alike("full", found, places(found))
        mine, theirs = state(canary).sources, state(other).sources
        assert torch.equal(mine.descriptors, theirs.descriptors)
        assert [(repr(s), s.address) for s in mine] == [(repr(s), s.address) for s in theirs]
    back = tensors(2)
    canary.slots.rebind("full", sources(back))
    other.slots.rebind("full", sources(back))
    assert torch.equal(state(canary).sources.descriptors, state(other).sources.descriptors)


def test_it_keeps_no_tensor_that_was_given_up() -> None:
    """A cache has the memory of its old tensors back."""
    canary = guarded(tensors(3))
    found = tensors(4)
    given_up = ref(found[5])
    assert canary.slots.rebind_alike("full", found, places(found))
    found = tensors(5)
    assert given_up() is not None
    assert canary.slots.rebind_alike("full", found, places(found))
    assert given_up() is None


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("bytes_", ["all", "partial"])
def test_tensors_that_are_let_go_are_kept_nowhere_and_not_read(alike: bool, bytes_: str) -> None:
    """Not by the region either. Bound anew, all is as before."""
    if alike and bytes_ == "partial":
        pytest.skip("cut sources are never bound alike")
    first = tensors(3)
    canary = guarded(first, bytes=bytes_, read_check=-1)
    if alike:
        first = tensors(4)
        assert canary.slots.rebind_alike("full", first, places(first))
    given_up = [ref(tensor) for tensor in first]
    descriptors = state(canary).sources.descriptors.clone()
    for _ in range(2):
        canary.slots.let_go("full")
    del first
    assert [there for there in given_up if there() is not None] == []
    assert not state(canary).readable
    canary.slots.check("full", torch.arange(4))
    canary.slots.adopt_bytes("full", torch.arange(4))
    canary.step.scrub.run(captured=False)
    canary.drain()
    assert canary.enabled
    assert canary.stats()["violations"] == 0
    found = tensors(4)
    if alike:
        assert canary.slots.rebind_alike("full", found, places(found))
    else:
        canary.slots.rebind("full", sources(found))
    assert state(canary).readable
    fresh = guarded(found, bytes=bytes_)
    assert torch.equal(state(canary).sources.descriptors, state(fresh).sources.descriptors)
    assert not torch.equal(state(canary).sources.descriptors, descriptors)
    assert [s.address for s in state(canary).sources] == [tensor.data_ptr() for tensor in found]


def odd(found: list[Tensor], which: str) -> tuple[list[Tensor], list[Placement]]:
    """Tensors that are not alike, or places that they do not have."""
    said = places(found)
    if which == "shape":
        found[4] = torch.randn(ROWS, HEADS, 5, DIM)
    elif which == "strides":
        found[4] = torch.randn(ROWS, 4, HEADS, DIM).transpose(1, 2)
    elif which == "type":
        found[4] = found[4].to(torch.float64)
    elif which == "alignment":
        found[4] = torch.randn(found[4].numel() + 1)[1:].view(found[4].shape)
    elif which == "fewer":
        found = found[:-2]
    elif which == "reach":
        said[1] = said[1]._replace(page_stride_bytes=said[1].page_stride_bytes + 16)
    elif which == "present":
        said[1] = said[1]._replace(present=ROOM + 1)
    return found, said


@pytest.mark.parametrize("which", ["shape", "strides", "type", "alignment", "fewer", "reach", "present"])
def test_what_is_not_alike_is_left_to_rebind(which: str) -> None:
    """Refused, with nothing changed."""
    canary = guarded(tensors(3))
    before = state(canary).sources.descriptors.clone()
    bound = state(canary).sources.bound
    assert not canary.slots.rebind_alike("full", *odd(tensors(4), which))
    assert torch.equal(state(canary).sources.descriptors, before)
    assert state(canary).sources.bound is bound


def test_sources_that_are_not_alike_are_left_to_rebind() -> None:
    """A source of another type than those that it takes turns with."""
    found = tensors(3)
    other = list(sources(found))
    other[4] = replace(other[4], dtype=None)
    canary = Canary([Region("full", ROWS * ROOM, tuple(other))], CanaryConfig.load())
    assert not canary.slots.rebind_alike("full", found, places(found))


def test_it_is_for_whole_slots_only() -> None:
    """Not where the first bytes are fingerprinted alone; in off mode there is nothing to do."""
    found = tensors(3)
    assert not guarded(found, bytes="partial").slots.rebind_alike("full", found, places(found))
    assert guarded(found, mode="off").slots.rebind_alike("full", found, places(found))
