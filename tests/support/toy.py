"""A toy engine: a paged K/V pool in which every byte is a function of (request history, position, layer, half), with
block tables, prefix sharing and eviction. It stands in for an engine where a test is about Canary's core alone."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from canary_core import BatchView, Canary, KVSource, Region, RegionKind, SlotTable, Writers


@dataclass
class Request:
    name: str
    tokens: list[int]
    cached: int = 0
    slots: list[int] = field(default_factory=list)


class ToyEngine:
    """Row pool of ``slots`` slots (slot 0 is padding), ``layers`` K and V tensors of ``row_elements`` elements a slot.

    With ``window`` a second pool of one layer holds the last ``window`` positions of each request; ``slot_map`` turns
    the first pool's slots into its slots, 0 for evicted."""

    def __init__(
        self,
        slots: int = 64,
        layers: int = 2,
        row_elements: int = 24,
        seed: int = 0,
        device: str = "cpu",
        window: int = 0,
    ) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.device = torch.device(device)
        shape = (slots, row_elements)
        self.k = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(layers)]
        self.v = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(layers)]
        self.table = torch.zeros(16, 64, dtype=torch.int32, device=device)
        self.window = window
        self.window_kv = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in "kv"]
        self.slot_map = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.free_window = list(range(1, slots))
        self.null_slots = 1
        self.free = list(range(1, slots))
        self.requests: list[Request] = []
        self.writers = Writers()

    def region(self, name: str = "full") -> Region:
        sources = []
        for layer, (k, v) in enumerate(zip(self.k, self.v, strict=True)):
            for half, tensor in (("k", k), ("v", v)):
                row = tensor.shape[1] * tensor.element_size()
                sources.append(
                    KVSource(tensor, half, layer, chunk_bytes=row, slot_stride_bytes=row, dtype=tensor.dtype)
                )
        return Region(name, self.k[0].shape[0], tuple(sources), null_slot=0, null_slots=self.null_slots)

    def window_region(self) -> Region:
        sources = []
        for half, tensor in zip("kv", self.window_kv, strict=True):
            row = tensor.shape[1] * tensor.element_size()
            sources.append(KVSource(tensor, half, 9, chunk_bytes=row, slot_stride_bytes=row, dtype=tensor.dtype))
        slots = self.window_kv[0].shape[0]
        return Region(
            "window", slots, tuple(sources), RegionKind.WINDOW, self.window, slot_map=self.slot_map, null_slot=0
        )

    def pool_tensors(self) -> dict[str, torch.Tensor]:
        """Where it keeps KV."""
        window = {f"window.{half}": t for half, t in zip("kv", self.window_kv, strict=True)} if self.window else {}
        return {**{f"{h}.{i}": t for h in "kv" for i, t in enumerate(getattr(self, h))}, **window}

    def regions(self) -> list[Region]:
        return [self.region(), self.window_region()] if self.window else [self.region()]

    def submit(self, name: str, tokens: list[int], shared: Request | None = None, prefix: int = 0) -> Request:
        request = Request(name, list(tokens), prefix, list(shared.slots[:prefix]) if shared else [])
        self.requests.append(request)
        return request

    def batch(self, new: dict[str, int] | None = None, chunk: int = 8) -> BatchView:
        """Allocates slots for the next chunk of every request and fills the device tables."""
        news = []
        for row, r in enumerate(self.requests):
            n = min(chunk, len(r.tokens) - r.cached)
            news.append(n)
            r.slots += [self.free.pop(0) for _ in range(n)]
            for s in r.slots[r.cached :] if self.window else ():
                self.slot_map[s] = self.free_window.pop(0)
            self.table[row, : len(r.slots)] = torch.tensor(r.slots, dtype=torch.int32, device=self.device)
        tokens = [t for r, n in zip(self.requests, news, strict=True) for t in r.tokens[r.cached : r.cached + n]]
        width = max(len(r.tokens) for r in self.requests)
        expected = [r.tokens + [-1] * (width - len(r.tokens)) for r in self.requests]
        self.news = news
        i32 = dict(dtype=torch.int32, device=self.device)
        writes = [s for r, n in zip(self.requests, news, strict=True) for s in r.slots[r.cached : r.cached + n]]
        table = SlotTable(self.table, write_slots=torch.tensor(writes, dtype=torch.int64, device=self.device))
        return BatchView(
            prefix_lens=torch.tensor([r.cached for r in self.requests], **i32),
            new_lens=torch.tensor(news, **i32),
            token_ids=torch.tensor(tokens, **i32),
            writers=torch.tensor([self.writers.id(r.name) for r in self.requests], **i32),
            tables=dict.fromkeys([r.name for r in self.regions()], table),
            expected_tokens=torch.tensor(expected, **i32),
        )

    def step(self, canary: Canary, chunk: int = 8, fault: Callable[[], object] | None = None) -> None:
        """One guarded forward of the next chunk of every request; ``fault`` happens right before it."""
        batch = self.batch(chunk=chunk)
        if fault:
            fault()
        canary.step.before(batch)
        self.forward(batch)
        canary.step.after(batch)
        canary.step.end()

    def forward(self, batch: BatchView) -> None:
        """Writes K and V of the new tokens."""
        slots = batch.tables["full"].write_slots.long()
        for layer, (k, v) in enumerate(zip(self.k, self.v, strict=True)):
            for half, tensor in enumerate((k, v)):
                seed = batch.token_ids.float()[:, None] * 0.37 + layer * 3 + half + 0.01
                tensor[slots] = torch.sin(seed + torch.arange(tensor.shape[1], device=self.device)).to(tensor.dtype)
                if self.window and layer == 0:
                    self.window_kv[half][self.slot_map[slots]] = -tensor[slots]
        for r, n in zip(self.requests, self.news, strict=True):
            r.cached += n
        self.evict()

    def evict(self) -> None:
        """Frees window slots that no later forward reads."""
        if self.window:
            kept = {s for r in self.requests for s in r.slots[max(r.cached - self.window + 1, 0) :]}
            for s in self.slot_map.nonzero()[:, 0].tolist():
                if s not in kept:
                    self.free_window.append(int(self.slot_map[s]))
                    self.slot_map[s] = 0

    def finish(self, request: Request) -> None:
        self.requests.remove(request)
        used = {s for r in self.requests for s in r.slots}
        self.free += [s for s in request.slots if s not in used]
