"""The order of things on a GPU, on a CPU: what a forward finds is known to the host of its rank when it has waited for
the tokens, or for the forward itself, else two forwards later."""

from collections import deque
from collections.abc import Callable
from functools import partial
from threading import RLock
from typing import Any


def know_findings_with_tokens(worker: Any = None) -> None:
    """In this process from now on."""
    from vllm.distributed.parallel_state import get_pp_group

    from canary_adapters.issued import Issued
    from canary_core.guard.reporting import verdicts
    from canary_core.guard.reporting.reader import Reader

    read, tell, begin = Reader.read, verdicts.tell, Issued.__init__
    found: deque[tuple[int, Callable[[], None]]] = deque()
    # Of pipeline stages the last one waits for tokens.
    samples, lock = get_pp_group().is_last_rank, RLock()
    forwards = known = 0

    def told(until: int) -> None:
        with lock:
            while found and found[0][0] <= until:
                found.popleft()[1]()

    def late(reader: Reader, number: int) -> None:
        nonlocal forwards
        forwards += 1
        told(forwards - 2)
        read(reader, number)

    def issued(self: Issued, *about: Any) -> None:
        begin(self, *about)
        self.forwards = forwards

    def wait(self: Issued) -> None:
        nonlocal known
        known = max(known, self.forwards)

    Reader.read = late
    Reader.judge = lambda reader: told(forwards if samples else known)
    Issued.__init__, Issued.wait = issued, wait
    verdicts.tell = lambda *about: found.append((forwards, partial(tell, *about)))
