"""The order of things on a GPU, on a CPU: what a forward finds is known to the host of its rank when it has waited for
the tokens, or for the forward itself, else two forwards later."""

from collections import deque
from collections.abc import Callable
from functools import partial
from threading import RLock
from typing import Any

from canary_core import Patches


def begin(worker: Any) -> None:
    """In a worker: from now on."""
    know_findings_with_tokens()


def know_findings_with_tokens() -> Patches:
    """In this process from now on, until it is undone."""
    from vllm.distributed.parallel_state import get_pp_group

    from canary_adapters.issued import Issued
    from canary_core.guard.reporting import verdicts
    from canary_core.guard.reporting.reader import Reader

    patches = Patches()
    found: deque[tuple[int, Callable[[], None]]] = deque()
    # Of pipeline stages the last one waits for tokens.
    samples, lock = get_pp_group().is_last_rank, RLock()
    forwards = known = 0

    def told(until: int) -> None:
        with lock:
            while found and found[0][0] <= until:
                found.popleft()[1]()

    def late(read: Callable[..., None]) -> Callable[..., None]:
        def reads(reader: Reader, number: int) -> None:
            nonlocal forwards
            forwards += 1
            told(forwards - 2)
            read(reader, number)

        return reads

    def issued(self: Issued, *about: Any) -> None:
        self.forwards = forwards

    def wait(self: Issued) -> None:
        nonlocal known
        known = max(known, self.forwards)

    patches.wrap(Reader, "read", late)
    patches.wrap(Reader, "judge", lambda _: lambda reader: told(forwards if samples else known))
    patches.wrap(Issued, "__init__", lambda _: issued)
    patches.wrap(Issued, "wait", lambda _: wait)
    patches.wrap(verdicts, "tell", lambda tell: lambda *about: found.append((forwards, partial(tell, *about))))
    return patches
