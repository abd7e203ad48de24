"""Allocators of slots, and their lists of free pages."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from canary_sglang.compat.drafts import FOLLOWED_SPECULATION
from canary_sglang.compat.runners import disaggregation, host_cache
from canary_sglang.compat.targets import existing

ALLOCATORS = "sglang.srt.mem_cache.allocator"
CLEAR, MERGE, RESTORE = "clear", "merge_and_sort_free", "restore_state"
FREES = frozenset({"free", "free_page_ids", "free_segment", "free_group_end"})
STATE_ALLOCATOR = "MambaSlotAllocator"
APPENDING_ALLOCATORS = frozenset({"TokenToKVPoolAllocator", STATE_ALLOCATOR})
"""What comes back goes to the end of their list; others put it in front."""

ALLOCATED_REGIONS = {"full": "full", "c4": "full", "c128": "full", "swa": "window"}
"""Regions whose slots an allocator hands out, and by which of its two lists."""


def lifetime_refusal(runner: Any) -> str | None:
    """Why the allocator is not followed though we know it, None if it is."""
    args = runner.server_args
    algorithm = getattr(args, "speculative_algorithm", None)
    if algorithm and str(algorithm).upper() not in FOLLOWED_SPECULATION:
        return f"speculative decoding by {algorithm}; what it does with slots was not looked at"
    if algorithm and (host_cache(runner) or disaggregation(runner) != "null"):
        return "speculative decoding with HiCache or PD disaggregation; not followed yet"
    return None


def allocator_functions() -> Sequence[str]:
    """All functions of allocators that change their list of free pages, as far as they exist. Imports the engine."""
    token, paged = f"{ALLOCATORS}.TokenToKVPoolAllocator", f"{ALLOCATORS}.PagedTokenToKVPoolAllocator"
    one, many = ("alloc", "free", CLEAR, MERGE, RESTORE), ("alloc_extend", "alloc_decode", "free_group_end")
    # The innermost of those that take back parts of a row.
    parts = "free_page_ids" if existing([f"{paged}.free_page_ids"]) else "free_segment"
    # A group of states that is not used up comes back through ``free``.
    state, states = f"{ALLOCATORS}.mamba.{STATE_ALLOCATOR}", ("alloc", "alloc_group_begin", "free", CLEAR)
    return existing(
        [
            *(f"{token}.{name}" for name in one),
            *(f"{paged}.{name}" for name in (*one, *many, parts)),
            *(f"{state}.{name}" for name in states),
        ]
    )


def free_lists(allocator: Any) -> dict[str, Any]:
    """The allocators that keep the lists of free pages, by the lists of `ALLOCATED_REGIONS`; none of those that we
    don't know. Recognised by the exact class: one derived from it may keep its list in another way."""
    known = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")
    kind = type(allocator).__name__
    lists = {"full": allocator}
    if kind == "SWATokenToKVPoolAllocator":
        lists = {"full": allocator.full_attn_allocator}
        if not getattr(allocator, "swa_req_ring", False):
            lists["window"] = allocator.swa_attn_allocator
    elif kind == "PureSWATokenToKVPoolAllocator":
        lists = {"window": allocator.swa_attn_allocator}
    return {name: part for name, part in lists.items() if type(part).__name__ in known}


def state_allocator(runner: Any) -> Any:
    """What hands out slots of recurrent states; None where there are none."""
    return getattr(getattr(runner, "req_to_token_pool", None), "mamba_allocator", None)


def hands_out_states(allocator: Any) -> bool:
    """Whether it hands out slots of recurrent states, and we know how. By the exact class, as in `free_lists`."""
    return type(allocator).__name__ == STATE_ALLOCATOR


def free_list(allocator: Any) -> Callable[[Any], torch.Tensor]:
    """What gives such an allocator's list of what can be handed out at once, but for `released_pages`."""
    return attrgetter("free_slots" if hands_out_states(allocator) else "free_pages")


def page_tokens(allocator: Any) -> int:
    """Slots of a page."""
    return 1 if hands_out_states(allocator) else int(allocator.page_size)


def released_pages(allocator: Any) -> Sequence[torch.Tensor]:
    """Pages that came back and wait to be sorted in; a list of them from 0.5.2x on, before that one tensor."""
    staged = getattr(allocator, "staged_pages", None)
    if staged is not None:
        pages: Sequence[torch.Tensor] = staged
        return pages
    released = getattr(allocator, "release_pages", None)
    return () if released is None else (released,)


def page_shares(name: str, allocator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int] | None:
    """How many new pages each row of a batch gets from the call ``name`` with these arguments; None where it doesn't
    say. From lengths on the host."""
    size = page_tokens(allocator)
    ends = kwargs.get("seq_lens_cpu")
    if name == "alloc_extend":
        ends = args[3] if ends is None and len(args) > 3 else ends
        begins = kwargs.get("prefix_lens_cpu", args[1] if len(args) > 1 else None)
    elif name == "alloc_decode":
        ends = args[1] if ends is None and len(args) > 1 else ends
        begins = None if ends is None else ends - 1
    else:
        return None
    if ends is None or begins is None:
        return None
    shares: list[int] = ((ends + size - 1) // size - (begins + size - 1) // size).tolist()
    return shares
