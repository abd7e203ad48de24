"""How messages of the scheduler's process reach the workers: with the scheduler's output."""

from collections.abc import Sequence
from typing import Any

from canary_adapters import AnswerParts, BlockMessage

ATTRIBUTE = "canary_lifetime"
"""Attribute of vLLM's `SchedulerOutput` with a message, pickled along."""

ANSWERS = "canary_answers"
"""The same with ends of answers, in some outputs."""


def attached(output: Any) -> BlockMessage | None:
    """The message sent with ``output``, None where the scheduler is not followed."""
    found = getattr(output, ATTRIBUTE, None)
    return found if isinstance(found, BlockMessage) else None


def answers(output: Any) -> AnswerParts | None:
    """Ends of answers sent with ``output``, None for none."""
    found = getattr(output, ANSWERS, None)
    return found if isinstance(found, AnswerParts) else None


def given(output: Any) -> Sequence[Sequence[Sequence[int]]]:
    """Blocks by group, of each request that got any with ``output``: handed out, or found in the prefix cache."""
    begun = [new.block_ids for new in output.scheduled_new_reqs]
    return begun + [more for more in output.scheduled_cached_reqs.new_block_ids if more is not None]
