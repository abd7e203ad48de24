"""`Ranks`: the ranks that schedule together, and so must make the same decisions."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from canary_sglang.actions.suspect import Suspect

T = TypeVar("T")


class Ranks:
    """The ranks that schedule together. ``group``: the CPU process group, None for a single rank."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._said = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._asked: Any = None
        self.size = 1 if group is None else torch.distributed.get_world_size(group)

    def alike(self, value: Any) -> bool:
        """Whether all ranks give the same ``value``. Waits for the other ranks."""
        told = self._gather(value)
        return all(bool(other == value) for other in told)

    def ask(self, has: bool, *numbers: int) -> None:
        """Asks all ranks whether any has a finding; ``has``: whether this one does. Of each of ``numbers`` the largest
        of all ranks is asked for beside. Does not wait: the answer comes while the engine works."""
        self._said = torch.tensor([int(has), *numbers], dtype=torch.int64, device="cpu")
        self._asked = torch.distributed.all_reduce(
            self._said, torch.distributed.ReduceOp.MAX, group=self._group, async_op=True
        )

    def anybody_had(self) -> bool:
        """The answer to the last `ask`, the same on all ranks; False before the first one. Waits for ranks that have
        not asked yet."""
        if self._asked is None:
            return False
        self._asked.wait()
        return bool(self._said[0])

    def largest(self) -> list[int]:
        """The numbers of the last `ask`, after `anybody_had`; none before the first one."""
        return [int(number) for number in self._said[1:]]

    def agree(self, found: Sequence[Suspect], gone: Sequence[Suspect]) -> tuple[list[Suspect], list[Suspect]]:
        """Suspects ``found`` by any rank, and those ``gone`` by any rank's word, in the same order on all. Waits for
        the other ranks."""
        said = self.union([(suspect, True) for suspect in found] + [(suspect, False) for suspect in gone])
        return [suspect for suspect, new in said if new], [suspect for suspect, new in said if not new]

    def union(self, items: Sequence[T]) -> list[T]:
        """All ranks' ``items``, each once, in order. Waits for the other ranks."""
        return sorted({item for rank in self._gather(list(items)) for item in rank})

    def _gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``."""
        told: list[Any] = [value]
        if self.size > 1:
            told = [None] * self.size
            torch.distributed.all_gather_object(told, value, group=self._group)
        return told
