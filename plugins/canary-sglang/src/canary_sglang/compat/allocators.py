"""SGLang's allocators of slots: the known classes, their functions, and their lists of free pages.

Allocators are recognised by the exact name of their class: a subclass may store its list in another way. An allocator
of recurrent states has pages of one slot.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor

from canary_core import FreeList
from canary_sglang.compat.drafts import FOLLOWED_SPECULATION
from canary_sglang.compat.runners import disaggregation, host_cache
from canary_sglang.compat.targets import ALLOCATORS, PAGED_ALLOCATOR, TOKEN_ALLOCATOR, existing

CLEAR, MERGE, RESTORE = "clear", "merge_and_sort_free", "restore_state"
FREES = frozenset({"free", "free_page_ids", "free_segment", "free_group_end"})
STATE_ALLOCATOR = "MambaSlotAllocator"

ALLOCATED_REGIONS = {"full": "full", "c4": "full", "c128": "full", "swa": "window"}
"""Regions with slots handed out by an allocator, and the list: the full pool's or the window's."""


def lifetime_refusal(runner: Any) -> str | None:
    """Why the events of a known allocator can't be followed, None if they can."""
    args = runner.server_args
    algorithm = getattr(args, "speculative_algorithm", None)
    if algorithm and str(algorithm).upper() not in FOLLOWED_SPECULATION:
        return f"speculative decoding by {algorithm}; what it does with slots was not looked at"
    if algorithm and (host_cache(runner) or disaggregation(runner) != "null"):
        return "speculative decoding with HiCache or PD disaggregation; not followed yet"
    return None


def allocator_functions() -> Sequence[str]:
    """The functions of allocators that change a list of free pages, as far as present in the installed release. Imports
    SGLang."""
    token, paged = f"{ALLOCATORS}.{TOKEN_ALLOCATOR}", f"{ALLOCATORS}.{PAGED_ALLOCATOR}"
    one, many = ("alloc", "free", CLEAR, MERGE, RESTORE), ("alloc_extend", "alloc_decode", "free_group_end")
    # ``free_segment`` calls ``free_page_ids`` where there is one.
    parts = "free_page_ids" if existing([f"{paged}.free_page_ids"]) else "free_segment"
    # SGLang frees the rest of a group of states through ``free``.
    state, states = f"{ALLOCATORS}.mamba.{STATE_ALLOCATOR}", ("alloc", "alloc_group_begin", "free", CLEAR)
    return existing(
        [
            *(f"{token}.{name}" for name in one),
            *(f"{paged}.{name}" for name in (*one, *many, parts)),
            *(f"{state}.{name}" for name in states),
        ]
    )


def page_allocators(allocator: Any) -> dict[str, Any]:
    """The allocators with the lists of free pages, by the lists of `ALLOCATED_REGIONS`. ``allocator`` may be one itself
    or have two. Other classes than `TOKEN_ALLOCATOR` and `PAGED_ALLOCATOR` are left out."""
    kind = type(allocator).__name__
    lists = {"full": allocator}
    if kind == "SWATokenToKVPoolAllocator":
        lists = {"full": allocator.full_attn_allocator}
        if not _has_request_rings(allocator):
            lists["window"] = allocator.swa_attn_allocator
    elif kind == "PureSWATokenToKVPoolAllocator":
        lists = {"window": allocator.swa_attn_allocator}
    return {name: part for name, part in lists.items() if type(part).__name__ in (TOKEN_ALLOCATOR, PAGED_ALLOCATOR)}


def state_allocator(runner: Any) -> Any:
    """The allocator of slots of recurrent states; None where there is none."""
    return getattr(getattr(runner, "req_to_token_pool", None), "mamba_allocator", None)


def hands_out_states(allocator: Any) -> bool:
    """Whether the allocator is a known one of slots of recurrent states."""
    return type(allocator).__name__ == STATE_ALLOCATOR


def appends(allocator: Any) -> bool:
    """Whether freed pages go to the end of the allocator's list; else to its front."""
    return type(allocator).__name__ in (TOKEN_ALLOCATOR, STATE_ALLOCATOR)


def free_pages_reader(allocator: Any) -> Callable[[Any], Tensor]:
    """A function that returns an allocator's list of pages to be handed out at once, without `released_pages`."""
    return attrgetter("free_slots" if hands_out_states(allocator) else "free_pages")


def page_tokens(allocator: Any) -> int:
    """Slots of a page."""
    return 1 if hands_out_states(allocator) else int(allocator.page_size)


def released_pages(allocator: Any) -> Sequence[Tensor]:
    """Freed pages not yet sorted into the list of free pages. From 0.5.2x on several tensors, before only one."""
    staged = getattr(allocator, "staged_pages", None)
    if staged is not None:
        pages: Sequence[Tensor] = staged
        return pages
    released = getattr(allocator, "release_pages", None)
    return () if released is None else (released,)


def free_lists(allocator: Any) -> list[FreeList]:
    """All present free pages of the allocator, for the comparison of a sweep of the prefix cache. Empty for unknown
    allocators, and for those with windows as rings of the requests."""
    if _has_request_rings(allocator):
        return []
    return [_free_list("swa" if name == "window" else None, part) for name, part in page_allocators(allocator).items()]


def freed_pages(name: str, allocator: Any, slots: Tensor) -> int:
    """Number of pages given back by a call of the function ``name`` with ``slots`` (pages, for ``free_page_ids``); -1
    where their number alone doesn't tell."""
    if appends(allocator) or name == "free_page_ids":
        return len(slots)
    return -(-len(slots) // allocator.page_size) if name == "free_segment" else -1


def page_shares(name: str, allocator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int] | None:
    """How many new pages each row of a batch gets from a call of the function ``name`` with these arguments, computed
    from lengths on the host; None where the arguments don't tell."""
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


def _free_list(region: str | None, allocator: Any) -> FreeList:
    size = page_tokens(allocator)
    pages = (free_pages_reader(allocator)(allocator), *released_pages(allocator))
    return FreeList(region, tuple(part for part in pages if len(part)), size, int(allocator.size) + size)


def _has_request_rings(allocator: Any) -> bool:
    """Whether each request has a ring of its own in the window, so that no list hands out its slots."""
    return bool(getattr(allocator, "swa_req_ring", False))
