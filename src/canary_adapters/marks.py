"""Words that go with the outputs of a runner like vLLM's, to the scheduler's process."""

from collections.abc import Callable, Sequence
from typing import Any

from canary_adapters.recompute_scheduler import WANTED
from canary_adapters.roll_call import Mark

MARK = "canary_mark"
"""Attribute of a runner's output with a mark, pickled along."""


def mark(output: Any, word: Mark, wanted: Callable[[], Sequence[str]] = list) -> None:
    """Attaches ``word``, and requests ``wanted`` of the scheduler, to ``output`` of a runner, which may be made later.
    An output without requests is shared."""
    if hasattr(output, "get_output"):
        made = output.get_output

        def get_output() -> Any:
            result = made()
            mark(result, word, wanted)
            return result

        output.get_output = get_output
    elif getattr(output, "req_ids", None):
        setattr(output, MARK, word)
        asked = wanted()
        if asked:
            setattr(output, WANTED, asked)
