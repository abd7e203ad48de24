"""`Ranks`: those that schedule together, and so must decide alike."""

from collections.abc import Sequence
from typing import Any

import torch

from canary_sglang.actions.suspect import Suspect


class Ranks:
    """Those that schedule together, through a process group on the host; None for a lone one."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._flag = torch.zeros(1, dtype=torch.int64)
        self._asked: Any = None
        self.size = 1 if group is None else torch.distributed.get_world_size(group)

    def alike(self, value: Any) -> bool:
        """Whether all have the same. Waits for the others."""
        told: list[Any] = [value]
        if self.size > 1:
            told = [None] * self.size
            torch.distributed.all_gather_object(told, value, group=self._group)
        return all(bool(other == value) for other in told)

    def ask(self, has: bool) -> None:
        """Puts the question whether anybody has something. Waits for nobody: it is answered while the engine works."""
        self._flag = torch.tensor([int(has)])
        self._asked = torch.distributed.all_reduce(
            self._flag, torch.distributed.ReduceOp.MAX, group=self._group, async_op=True
        )

    def anybody_had(self) -> bool:
        """The answer to `ask`, the same on all; false if it never was. Waits for those that did not ask yet."""
        if self._asked is None:
            return False
        self._asked.wait()
        return bool(self._flag)

    def agree(self, found: Sequence[Suspect], gone: Sequence[Suspect]) -> tuple[list[Suspect], list[Suspect]]:
        """What any of them found, and what any of them says is gone, in one order for all. Waits for the others."""
        told: list[Any] = [(list(found), list(gone))]
        if self.size > 1:
            told = [None] * self.size
            torch.distributed.all_gather_object(told, (list(found), list(gone)), group=self._group)
        parts = [sorted({s for rank in told for s in rank[part]}) for part in (0, 1)]
        return parts[0], parts[1]
