"""What the scheduler's process tells the workers of blocks: it travels with the scheduler's output."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from canary_adapters import BlockEvent
from canary_vllm.prefix_cache.structure import Swept

ATTRIBUTE = "canary_lifetime"
"""Under this name a message is an attribute of vLLM's `SchedulerOutput`, which is pickled with its attributes."""


@dataclass(slots=True)
class Load:
    """A connector will bring the KV of ``request`` from position ``first`` on. ``tokens``: all of its tokens up to the
    last one that is brought. ``blocks``: of each group, the blocks from that of position ``first`` on, 0 for none."""

    request: str
    tokens: list[int]
    first: int
    blocks: list[list[int]]


@dataclass(slots=True)
class Message:
    """All that happened since the message before. ``number`` counts up by one, so that a worker notices a loss.
    ``broken``: why blocks can't be followed any more, None if they can. ``swept``: what a sweep of the prefix cache
    came to, None if there was none. ``salts``: the cache salts of new requests, by name."""

    number: int
    events: list[BlockEvent] = field(default_factory=list)
    broken: str | None = None
    loads: list[Load] = field(default_factory=list)
    swept: Swept | None = None
    salts: dict[str, str] = field(default_factory=dict)


def attach(output: Any, message: Message) -> None:
    """``message`` goes where ``output`` goes."""
    setattr(output, ATTRIBUTE, message)


def attached(output: Any) -> Message | None:
    """The message that came with ``output``, None where the scheduler is not followed."""
    found = getattr(output, ATTRIBUTE, None)
    return found if isinstance(found, Message) else None


def given(output: Any) -> Sequence[Sequence[Sequence[int]]]:
    """Blocks by group, of each request that got any with ``output``: handed out, or found in the prefix cache."""
    begun = [new.block_ids for new in output.scheduled_new_reqs]
    return begun + [more for more in output.scheduled_cached_reqs.new_block_ids if more is not None]
