"""`Ranks`: the ranks that schedule together, and so must make the same decisions; `Stages`: those of a pipeline."""

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")

KEPT_ROUNDS = 256
"""How many rounds with items of a rank stay in the store: far more than any rank has begun and not ended."""


class Ranks:
    """The ranks that schedule together. ``group``: the CPU process group, None for a single rank.

    In a round ranks exchange items, if any rank has some: ``begin_round`` does not wait, ``end_round`` does."""

    staged = False

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

    def begin_round(self, has: bool, items: Callable[[], Sequence[T]]) -> None:
        """Begins a round, on every rank. ``has``: whether this rank wants an exchange of items. ``items``: as in
        `end_round`."""
        self.ask(has)

    def end_round(self, items: Callable[[], Sequence[T]]) -> list[T] | None:
        """Ends the round: all ranks' ``items()``, each once, in the same order; None where no rank wanted an exchange,
        or without a round. Waits for the ranks that have not begun the round yet."""
        had = self.anybody_had()
        self._asked = None
        return self.union(items()) if had else None

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


class Stages(Ranks):
    """The ranks of all stages of a pipeline. The schedulers make the same turns, but not at the same time: a stage is a
    turn ahead of the next, and the next waits for the stage's output. So no stage may wait for all at one place. The
    items of a rank lie in ``store`` before the round begins, and rounds end in the order of their beginnings, any
    number of turns later. ``store``: torch.distributed's."""

    staged = True

    def __init__(self, group: Any, store: Any) -> None:
        super().__init__(group)
        self._store = store
        self._own = torch.distributed.get_rank(group)
        self._open: deque[tuple[Any, Any]] = deque()
        self._kept: deque[str] = deque()
        self._begun = self._ended = 0

    def begin_round(self, has: bool, items: Callable[[], Sequence[T]]) -> None:
        """See `Ranks`; ``items`` are the present ones."""
        if has:
            key = _key(self._begun, self._own)
            self._store.set(key, pickle.dumps(list(items())))
            self._kept.append(key)
        if len(self._kept) > KEPT_ROUNDS:
            self._store.delete_key(self._kept.popleft())
        self._begun += 1
        self.ask(has)
        self._open.append((self._said, self._asked))

    def end_round(self, items: Callable[[], Sequence[T]]) -> list[T] | None:
        """See `Ranks`. Waits for the ranks only that have not begun the round yet."""
        if not self._open:
            return None
        self._said, self._asked = self._open.popleft()
        self._ended += 1
        return sorted(set(self._read(self._ended - 1))) if self.anybody_had() else None

    def _read(self, number: int) -> Iterator[Any]:
        """The ranks' items of a round."""
        for key in (_key(number, rank) for rank in range(self.size)):
            if self._store.check([key]):
                yield from pickle.loads(self._store.get(key))


def _key(number: int, rank: int) -> str:
    return f"canary/round/{number}/{rank}"
