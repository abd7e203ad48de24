"""The order of things on a GPU, on a CPU: what a forward finds is known when its tokens have come, and no sooner."""

from typing import Any

from canary_sglang.compat import schedulers

from canary_core.guard.reporting.reader import Reader


def know_findings_with_tokens(engine: Any) -> None:
    """From now on. To be called before the engine's first batch. Stands in for a GPU: the counters are read only where
    the scheduler has waited for tokens, by which time it has issued the next batch."""
    read = Reader.read
    forwards: dict[int, int] = {}

    def keep(reader: Reader, number: int) -> None:
        forwards[id(reader)] = number

    def judge(reader: Reader) -> None:
        read(reader, forwards.get(id(reader), 0))

    Reader.read, Reader.judge = keep, judge
    schedulers.on_gpu = lambda scheduler: True
