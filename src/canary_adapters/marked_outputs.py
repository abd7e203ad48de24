"""`mark`: words of a worker beside the outputs of its runner, on their way to the scheduler's process; `carried`: those
of another process."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from canary_adapters.roll_call import Mark

Sort = TypeVar("Sort")

MARK = "canary_mark"
"""Attribute of a runner's output with a `Mark`, pickled along."""

WANTED = "canary_wanted"
"""The same with requests that somebody asks a worker for."""


def mark(
    output: Any, word: Mark, wanted: Callable[[], Sequence[str]] = list, made: Callable[[], None] | None = None
) -> None:
    """Attaches ``word``, and requests ``wanted`` of the scheduler, to ``output`` of a runner, which may be made later,
    in another thread. An output without requests is shared, and has no tokens. ``made``: called when the output's
    tokens are on the host."""
    if hasattr(output, "get_output"):
        make = output.get_output

        def get_output() -> Any:
            result = make()
            mark(result, word, wanted, made)
            return result

        output.get_output = get_output
        return
    if getattr(output, "req_ids", None):
        if made is not None:
            made()
        setattr(output, MARK, word)
        asked = wanted()
        if asked:
            setattr(output, WANTED, asked)


def carried(output: Any, name: str, sort: type[Sort]) -> Sort | None:
    """The attribute ``name`` of ``output``, if it is of this ``sort``; another Canary's may be of another one."""
    found = getattr(output, name, None)
    return found if isinstance(found, sort) else None
