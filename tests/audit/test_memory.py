"""An engine's tensors are found in its objects, and its storages counted once."""

import collections
from dataclasses import dataclass, field

import torch

from canary_core import tensors_of
from canary_core.watchers.audit.memory import EngineMemory


class Part:
    __slots__ = ("k", "unset")

    def __init__(self) -> None:
        self.k = torch.zeros(3)


@dataclass
class Pool:
    buffers: list = field(default_factory=lambda: [torch.zeros(2), (torch.zeros(2), "text")])
    by_name: dict = field(default_factory=lambda: {"x": torch.zeros(1), 3: Part()})
    part: Part = field(default_factory=Part)
    number: int = 3
    other: object = None

    @property
    def computed(self) -> torch.Tensor:
        raise AssertionError("nothing of the engine is called")


def test_tensors_are_found_wherever_an_object_holds_them():
    """In attributes and slots, lists and tuples, dicts, and objects of the same package; each once, in circles, too."""
    pool = Pool()
    pool.other = pool
    pool.again = pool.buffers[0]
    found = tensors_of(pool)
    assert set(found) == {"again", "buffers[1][0]", "by_name['x']", "by_name[3].k", "part.k"}
    assert found["part.k"] is pool.part.k


def test_foreign_objects_are_not_entered():
    """Of another package than the engine's; and what the caller leaves out."""
    pool = Pool()
    pool.other = collections.UserList([torch.zeros(1)])
    assert not any("other" in name for name in tensors_of(pool))
    left = tensors_of(pool, lambda name, value: isinstance(value, Part) or name == "buffers[0]")
    assert set(left) == {"buffers[1][0]", "by_name['x']"}


def test_a_container_is_walked_as_well():
    """Several pools of one engine."""
    assert set(tensors_of({"a": Part(), "b": [torch.zeros(1)]})) == {"['a'].k", "['b'][0]"}


def test_memory_counts_each_storage_once():
    """Views of one storage, and a tensor without elements, add nothing."""
    whole = torch.zeros(4, 6)
    memory = EngineMemory({"k": whole[:2], "v": whole[2:], "empty": torch.zeros(0), "s": torch.zeros(5)})
    assert [s.data.numel() for s in memory.storages] == [96, 20]
    assert memory.size_bytes == 116
    assert memory.storages[0].tensor_at(50)[0] == "v"
    assert memory.storages[0].names == "'k', 'v'"
