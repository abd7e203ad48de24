"""SGLang's own allocators, without an engine: what is told of them is what became of their lists."""

import random
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from canary_sglang.allocator.lifetime import Lifetime
from canary_sglang.batches.writers import RequestWriters
from canary_sglang.compat import allocators

from canary_core import Writers

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
SIZE = 64


class Told:
    """Stands in for a `Canary`: pages and who was told to own them."""

    enabled = True
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.regions = {"full": SimpleNamespace(name="full", slots=SIZE + 8, tokens_per_slot=1, device="cpu")}
        self.free = set(range(1, SIZE + 1))
        self.freers: dict[int, int] = {}
        self.takers: dict[int, int] = {}
        self.events: list[Any] = []
        self.frees = 0
        self.going_on: Any = lambda: None
        self.slots = SimpleNamespace(
            alloc=self.handed_out,
            free=self.came_back,
            defer=self.defer,
            clear=self.clear,
            end_lifetime=self.end_lifetime,
        )

    def guard(self, where: str) -> Any:
        return nullcontext()

    def handed_out(self, region: str, pages: torch.Tensor, writer: Any, page_slots: int) -> None:
        assert self.free.issuperset(pages.tolist())
        self.free -= set(pages.tolist())
        ids = writer() if callable(writer) else writer
        ids = ids.tolist() if isinstance(ids, torch.Tensor) else [ids] * len(pages)
        self.takers.update(zip(pages.tolist(), ids, strict=True))

    def came_back(self, region: str, pages: torch.Tensor, writer: Any, page_slots: int, ready: Any) -> None:
        assert self.free.isdisjoint(pages.tolist())
        self.free |= set(pages.tolist())
        self.frees += 1
        ids = writer() if callable(writer) else writer
        ids = ids.tolist() if isinstance(ids, torch.Tensor) else [ids] * len(pages)
        self.freers.update(zip(pages.tolist(), ids, strict=True))

    def defer(self, tell: Any) -> None:
        self.going_on = tell

    def settle(self) -> None:
        self.going_on()

    def clear(self, region: str, slots: None) -> None:
        self.free = set(range(1, self.pages + 1))

    def end_lifetime(self, region: str) -> None:
        self.free = set()

    def tell(self, event: Any) -> None:
        self.events.append(event)


@pytest.fixture(
    params=[(1, False), (1, True), (4, False), (4, True)], ids=["token", "token_sort", "pages", "pages_sort"]
)
def followed(request: pytest.FixtureRequest) -> tuple[Any, Told, Lifetime]:
    """A real allocator, hooked in place."""
    from sglang.srt.mem_cache import allocator as module

    page_size, need_sort = request.param
    common = dict(dtype=torch.bfloat16, device="cpu", kvcache=None, need_sort=need_sort)
    if page_size == 1:
        allocator = module.TokenToKVPoolAllocator(SIZE, **common)
    else:
        allocator = module.PagedTokenToKVPoolAllocator(SIZE, page_size, **common)
    told = Told()
    told.pages = SIZE // page_size
    told.free = set(range(1, told.pages + 1))
    lifetime = Lifetime(
        SimpleNamespace(token_to_kv_pool_allocator=allocator, server_args=None),
        told,
        RequestWriters(Writers(), torch.device("cpu")),
    )
    for target in allocators.allocator_functions():
        owner, _, name = target.rpartition(".")
        if owner.endswith(type(allocator).__name__):
            setattr(allocator, name, partial(lifetime.call, name, getattr(type(allocator), name), allocator))
    return allocator, told, lifetime


def really_free(allocator: Any) -> set[int]:
    """The allocator's own list."""
    return set(torch.cat([allocator.free_pages, *allocators.released_pages(allocator)]).tolist())


def test_every_change_of_a_list_is_told(followed):
    """Random allocations, frees alone and in groups, in part by segments, and a flush: always the list as it is."""
    allocator, told, _ = followed
    rng = random.Random(0)
    held: list[torch.Tensor] = []
    for step in range(400):
        if rng.random() < 0.55 or not held:
            slots = allocator.alloc(rng.choice([1, 2, 3]) * allocator.page_size)
            held += [] if slots is None else [slots]
        else:
            grouped = rng.random() < 0.5
            if grouped:
                allocator.free_group_begin()
            for _ in range(rng.choice([1, 1, 3])):
                if held:
                    slots = held.pop(rng.randrange(len(held)))
                    segments = hasattr(allocator, "free_segment") and rng.random() < 0.5
                    allocator.free_segment(slots, start_pos=0) if segments else allocator.free(slots)
            if grouped:
                allocator.free_group_end()
        if step == 200:
            allocator.clear()
            held = []
        if rng.random() < 0.5:
            told.settle()
            assert told.free == really_free(allocator), step
    assert told.events == []


def test_who_freed_and_who_got(followed):
    """Requests that let go in one group, each with its own slots; rows of a batch that get one page each."""
    allocator, told, lifetime = followed
    names = ["a", "b", "c"]
    ids = [lifetime.owners._writers.id(name) for name in names]
    batch = SimpleNamespace(reqs=[SimpleNamespace(rid=name) for name in names])
    slots = lifetime.owners.preparing(batch, partial(allocator.alloc, 3 * allocator.page_size))
    pages = (slots[:: allocator.page_size] // allocator.page_size).tolist()
    assert [told.takers[page] for page in pages] == ids
    allocator.free_group_begin()
    for request, own in zip(batch.reqs, slots.split(allocator.page_size), strict=True):
        release = partial(allocator.free_segment, start_pos=0) if hasattr(allocator, "free_segment") else allocator.free
        lifetime.owners.releasing(request, partial(release, own.clone()))
    allocator.free_group_end()
    told.settle()
    if hasattr(allocator, "free_segment"):
        assert [told.freers[page] for page in pages] == ids


def test_what_comes_back_in_a_row_is_told_at_once(followed):
    """Requests that end one after the other: one event, of the list as it is in the end, that knows whose each page
    was; no view of a list that SGLang has replaced is kept."""
    allocator, told, lifetime = followed
    own = [allocator.alloc(2 * allocator.page_size) for _ in range(5)]
    told.frees = 0
    lists = []
    for number, slots in enumerate(own):
        lists.append(weakref.ref(allocator.free_pages))
        request = SimpleNamespace(rid=f"r{number}")
        lifetime.owners.releasing(request, partial(allocator.free, slots.clone()))
    assert len({id(kept()) for kept in lists if kept() is not None}) <= 1
    told.settle()
    assert told.frees == 1
    assert told.free == really_free(allocator)
    for number, slots in enumerate(own):
        pages = set((slots // allocator.page_size).tolist())
        assert {told.freers[page] for page in pages} == {lifetime.owners._writers.id(f"r{number}")}
    assert told.events == []


def test_a_list_that_something_else_changes(followed):
    """Then nothing can be said any more: one event, and nothing counts as freed."""
    allocator, told, _ = followed
    allocator.free_pages = allocator.free_pages[2:]
    allocator.alloc(allocator.page_size)
    allocator.alloc(allocator.page_size)
    assert [event.name for event in told.events] == ["lifetime_off"]
    assert told.free == set()


def test_every_change_of_the_list_of_states_is_told():
    """Random allocations, one by one, together and out of a group that was taken ahead, frees, and a flush."""
    module = pytest.importorskip("sglang.srt.mem_cache.allocator.mamba")
    allocator, told = module.MambaSlotAllocator(SIZE, "cpu"), Told()
    told.pages = SIZE
    told.regions = {"mamba": SimpleNamespace(name="mamba", slots=SIZE + 1, tokens_per_slot=1, device="cpu")}
    runner = SimpleNamespace(
        token_to_kv_pool_allocator=None,
        req_to_token_pool=SimpleNamespace(mamba_allocator=allocator),
        server_args=None,
    )
    lifetime = Lifetime(runner, told, RequestWriters(Writers(), torch.device("cpu")))
    for target in allocators.allocator_functions():
        owner, _, name = target.rpartition(".")
        if owner.endswith("MambaSlotAllocator"):
            setattr(allocator, name, partial(lifetime.call, name, getattr(type(allocator), name), allocator))
    rng = random.Random(0)
    held: list[torch.Tensor] = []
    for step in range(400):
        grouped = rng.random() < 0.3
        if grouped:
            allocator.alloc_group_begin(rng.randrange(6))
        for _ in range(rng.randrange(4)):
            if rng.random() < 0.55 or not held:
                slots = allocator.alloc(rng.choice([1, 1, 2]))
                held += [] if slots is None else [slots]
            else:
                allocator.free(held.pop(rng.randrange(len(held))))
        if grouped:
            allocator.alloc_group_end()
        if step == 200:
            allocator.clear()
            held = []
        told.settle()
        assert told.free == set(allocator.free_slots.tolist()), step
    assert told.events == []
