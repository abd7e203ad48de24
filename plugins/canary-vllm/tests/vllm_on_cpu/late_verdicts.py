"""The order of things on a GPU, on a CPU: what a forward finds is known to the host of its rank when it has waited for
the tokens, else two forwards later."""

from collections import deque
from functools import partial
from typing import Any


def know_findings_with_tokens(worker: Any = None) -> None:
    """In this process from now on."""
    from canary_core.guard.reporting import verdicts
    from canary_core.guard.reporting.reader import Reader

    read, tell = Reader.read, verdicts.tell
    found: deque[list[Any]] = deque([[]])

    def judge(reader: Reader, forwards: int = 0) -> None:
        found.append([])
        while len(found) > forwards + 1:
            for told in found.popleft():
                told()

    def late(reader: Reader, number: int) -> None:
        judge(reader, 2)
        read(reader, number)

    Reader.read, Reader.judge = late, judge
    verdicts.tell = lambda *about: found[-1].append(partial(tell, *about))
