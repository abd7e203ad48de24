"""How messages of the scheduler's process reach the workers: with the scheduler's output."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from canary_adapters import AnswerParts, BlockMessage, carried

ATTRIBUTE = "canary_lifetime"
"""Attribute of vLLM's `SchedulerOutput` with a message, pickled along."""

ANSWERS = "canary_answers"
"""The same with ends of answers, in some outputs."""

attached = partial(carried, name=ATTRIBUTE, sort=BlockMessage)
"""The message sent with an output, None where the scheduler is not followed."""

answers = partial(carried, name=ANSWERS, sort=AnswerParts)
"""Ends of answers sent with an output, None for none."""


def given(output: Any) -> Sequence[Sequence[Sequence[int]]]:
    """Blocks by group, of each request that got any with ``output``: handed out, or found in the prefix cache."""
    begun = [new.block_ids for new in output.scheduled_new_reqs]
    return begun + [more for more in output.scheduled_cached_reqs.new_block_ids if more is not None]


def begun(output: Any) -> set[str]:
    """The requests begun with ``output``, or begun again after the loss of their blocks."""
    again = getattr(output.scheduled_cached_reqs, "resumed_req_ids", ())
    return {new.req_id for new in output.scheduled_new_reqs}.union(again)
