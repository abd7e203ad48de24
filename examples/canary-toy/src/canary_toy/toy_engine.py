"""A toy paged engine: small enough to read, and built like a real one. Nothing of Canary is in it.

One forward prefills at most `CHUNK` tokens or decodes one token of each running request. Page 0 is the null block: rows
that only fill a decode batch up to a multiple of `ROW_MULTIPLE` write there. A forward reads its batch from buffers
that never move, as a CUDA graph does.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import torch
from torch import Tensor

LAYERS, HEADS, DIM, VOCABULARY = 2, 2, 8, 256
PAGE, CHUNK, MOST_ROWS, ROW_MULTIPLE = 4, 16, 8, 4


@dataclass(eq=False)
class Request:
    """``tokens``: prompt and answer. The first ``computed`` of them have their K and V in ``pages``. ``row``: its row
    of the block tables while it runs. ``salt``: only requests with the same one share K and V. ``embeds``: float
    ``[n, HEADS * DIM]``, in the place of the first tokens."""

    name: str
    tokens: list[int]
    prompt_tokens: int
    new_tokens: int
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    row: int = -1
    salt: str = ""
    embeds: Tensor | None = None

    @property
    def keys(self) -> list[int]:
        """The tokens as the prefix cache keeps them apart: a digest in the place of one with an embedding."""
        digests = [] if self.embeds is None else [hash(bytes(row.numpy())) for row in self.embeds]
        return [*digests, *self.tokens[len(digests) :]]

    @property
    def answer(self) -> list[int]:
        """The tokens that were generated so far."""
        return self.tokens[self.prompt_tokens :]


class KVPool:
    """For each layer one tensor ``[2, pages, PAGE, HEADS, DIM]``: K, then V. Slot ``s`` is row ``s % PAGE`` of page
    ``s // PAGE``."""

    def __init__(self, pages: int, device: torch.device) -> None:
        self.layers = [torch.zeros(2, pages, PAGE, HEADS, DIM, device=device) for _ in range(LAYERS)]

    def store(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """K and V of new tokens, each ``[tokens, HEADS, DIM]``, on one layer."""
        for half, new in zip(self.layers[layer], (keys, values), strict=True):
            half.view(-1, HEADS, DIM)[slots] = new

    def copy_page(self, source: int, destination: int) -> None:
        """On all layers."""
        for kv in self.layers:
            kv[:, destination] = kv[:, source]


class BlockAllocator:
    """Hands pages out from a free list. ``users``: how many requests hold each page."""

    def __init__(self, pages: int) -> None:
        self.free_pages = list(range(pages - 1, 0, -1))
        self.users = [0] * pages

    def allocate(self, count: int) -> list[int]:
        """``count`` free pages, for one user. Raises IndexError if there are not so many."""
        pages = [self.free_pages.pop() for _ in range(count)]
        for page in pages:
            self.users[page] = 1
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Takes pages back that nobody uses."""
        self.free_pages.extend(pages)


class PrefixCache:
    """Full pages by the hash of all tokens up to their end. Pages that no request holds are parked here until they are
    evicted, the least recently used first."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self.pages: dict[int, int] = {}
        self.hashes: dict[int, int] = {}
        self.parked: OrderedDict[int, None] = OrderedDict()

    def match(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """The pages of the longest beginning of ``tokens`` that is cached."""
        return [self.pages[key] for key in takewhile(self.pages.__contains__, page_hashes(tokens, salt))]

    def take(self, pages: Sequence[int]) -> None:
        """A request uses cached pages, or a fork those of its parent."""
        for page in pages:
            self.allocator.users[page] += 1
            self.parked.pop(page, None)

    def insert(self, tokens: Sequence[int], pages: Sequence[int], salt: str = "") -> None:
        """Publishes the full pages of ``tokens``, whose K and V have been computed."""
        for key, page in zip(page_hashes(tokens, salt), pages, strict=False):
            if key not in self.pages and page not in self.hashes:
                self.pages[key], self.hashes[page] = page, key

    def park(self, pages: Sequence[int]) -> None:
        """Nobody holds these cached pages any more."""
        self.parked.update(dict.fromkeys(pages))

    def evict(self) -> list[int]:
        """Gives the least recently used parked page back to the free list; gives [] where none is parked."""
        if not self.parked:
            return []
        page, _ = self.parked.popitem(last=False)
        del self.pages[self.hashes.pop(page)]
        self.allocator.free_pages.append(page)
        return [page]


def page_hashes(tokens: Sequence[int], salt: str = "") -> Iterator[int]:
    """Of each full page, the hash of the salt and all tokens up to its end."""
    key = hash(salt)
    for end in range(PAGE, len(tokens) + 1, PAGE):
        key = hash((key, *tokens[end - PAGE : end]))
        yield key


@dataclass(eq=False)
class Batch:
    """One forward. ``rows``: each row's row of the block tables; ``prefix_lens``, ``new_lens``: how many tokens it has
    in the pool, and how many are computed now (both 0 in rows of padding); ``pages``: the pages that attention reads.
    By new token, those of padding at the end: ``token_ids``, ``positions``, ``slot_mapping`` (where K and V go).
    ``embeds``: by new token, an embedding in the place of its token's, None for most."""

    requests: list[Request]
    rows: Tensor
    prefix_lens: Tensor
    new_lens: Tensor
    pages: Tensor
    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    embeds: list[Tensor | None] = field(default_factory=list)


class ModelRunner:
    """Two layers of attention with weights from ``seed``, which read K and V through a batch's pages."""

    def __init__(self, pool: KVPool, block_tables: Tensor, seed: int) -> None:
        self.pool, self.block_tables = pool, block_tables
        draw, width = torch.Generator().manual_seed(seed), HEADS * DIM

        def weights(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(block_tables.device) / shape[0] ** 0.5

        self.tokens, self.head = weights(VOCABULARY, width) * 16, weights(width, VOCABULARY)
        turns = torch.arange(block_tables.shape[1] * PAGE)[:, None] / 1.5 ** torch.arange(width)
        self.places = turns.sin().to(block_tables.device)
        self.layers = [{name: weights(width, width) for name in ("q", "k", "v", "out")} for _ in pool.layers]
        numbers = dict(dtype=torch.int64, device=block_tables.device)
        by_row = {name: torch.zeros(MOST_ROWS, **numbers) for name in ("rows", "prefix_lens", "new_lens")}
        by_token = {name: torch.zeros(CHUNK, **numbers) for name in ("token_ids", "positions", "slot_mapping")}
        self.buffers = {**by_row, **by_token, "pages": torch.zeros_like(block_tables)}

    def update_weights(self, seed: int) -> None:
        """As after training: other weights in the same memory."""
        draw = torch.Generator().manual_seed(seed)
        for weights in (self.tokens, self.head, *(w for layer in self.layers for w in layer.values())):
            weights.copy_(torch.randn(weights.shape, generator=draw) * weights.std().cpu())

    def load(self, batch: Batch) -> Batch:
        """Copies a batch to the buffers that `forward` reads; gives it as it is there."""
        there = {name: buffer[: len(getattr(batch, name))] for name, buffer in self.buffers.items()}
        for name, buffer in there.items():
            buffer.copy_(getattr(batch, name))
        return replace(batch, **there)

    def forward(self, batch: Batch) -> Tensor:
        """Stores K and V of the new tokens, attends, and gives each request's next token, int64 ``[requests]``."""
        x = self.tokens[batch.token_ids]
        for at, embedding in enumerate(batch.embeds):
            if embedding is not None:
                x[at] = embedding
        x += self.places[batch.positions]
        ends, index = batch.new_lens.cumsum(0), torch.arange(len(x), device=x.device)
        row = torch.searchsorted(ends, index, right=True).clamp(max=len(ends) - 1)
        last = batch.prefix_lens[row] + index - (ends - batch.new_lens)[row]
        pages = batch.pages[row].long()
        visible = torch.arange(pages.shape[1] * PAGE, device=x.device) <= last[:, None]
        for layer, (kv, weights) in enumerate(zip(self.pool.layers, self.layers, strict=True)):
            q, k, v = ((x @ weights[name]).view(-1, HEADS, DIM) for name in ("q", "k", "v"))
            self.pool.store(layer, batch.slot_mapping, k, v)
            keys, values = kv[0][pages].flatten(1, 2), kv[1][pages].flatten(1, 2)  # [tokens, slots, HEADS, DIM]
            # Sharp, and a large part of what comes out: so one wrong value of the pool soon changes the answer.
            scores = 2 * torch.einsum("thd,tshd->ths", q, keys).masked_fill(~visible[:, None], -torch.inf)
            attended = torch.einsum("ths,tshd->thd", scores.softmax(-1), values)
            x = torch.tanh(x + 8 * attended.flatten(1) @ weights["out"])
        return (x[ends[: len(batch.requests)] - 1] @ self.head).argmax(-1)


class Engine:
    """Schedules requests: `submit` some, then `step` until it gives False. When pages run out it evicts from the prefix
    cache, then preempts the request that came last.
    ``computed_tokens``: of all forwards, for whoever wants to know its throughput."""

    def __init__(self, pages: int = 48, seed: int = 0, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.pool = KVPool(pages, self.device)
        self.allocator = BlockAllocator(pages)
        self.cache = PrefixCache(self.allocator)
        self.block_tables = torch.zeros(MOST_ROWS, pages - 1, dtype=torch.int32, device=self.device)
        self.runner = ModelRunner(self.pool, self.block_tables, seed)
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.free_rows = list(range(MOST_ROWS))
        self.computed_tokens = 0

    def submit(
        self, name: str, tokens: Sequence[int], new_tokens: int, salt: str = "", embeds: Tensor | None = None
    ) -> Request:
        """Queues a request. Raises ValueError if it has no tokens, runs already or is too long for the pool."""
        if not tokens or new_tokens < 1 or len(tokens) + new_tokens > self.block_tables.shape[1] * PAGE:
            raise ValueError(f"request {name!r} must have tokens, ask for some and fit the pool")
        if self.requests.get(name) in (*self.waiting, *self.running):
            raise ValueError(f"request {name!r} runs already")
        request = Request(name, list(tokens), len(tokens), new_tokens, salt=salt, embeds=embeds)
        self.requests[name] = request
        self.waiting.append(request)
        return request

    def step(self) -> bool:
        """Runs one forward; False if there was nothing to run."""
        while self.waiting and self.free_rows:
            self._admit(self.waiting.pop(0))
        scheduled = self._schedule()
        if not scheduled:
            return False
        tokens = self.runner.forward(self.runner.load(self._batch(scheduled))).tolist()
        for (request, count), token in zip(scheduled, tokens, strict=True):
            request.computed += count
            self.computed_tokens += count
            # Only now: a page that is published before its forward would be hit by others of the same forward.
            self.cache.insert(request.keys[: request.computed], request.pages, request.salt)
            if request.computed == len(request.tokens):
                request.tokens.append(token)
                if len(request.answer) == request.new_tokens:
                    self._stop(request)
        return True

    def update_weights(self, seed: int, flush_cache: bool = True) -> None:
        """Goes on with other weights. What older ones have computed is dropped from the prefix cache, unless that is to
        be kept."""
        self.runner.update_weights(seed)
        while flush_cache and self.cache.evict():
            pass

    def preempt(self, request: Request) -> None:
        """Takes a running request's pages; it is computed again later."""
        self._stop(request)
        self.waiting.insert(0, request)

    def abort(self, request: Request) -> None:
        """Ends a request wherever it is."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self._stop(request)

    def fork(self, parent: Request, name: str) -> Request:
        """Another request that goes on from a running one: shares its full pages and copies the one that isn't full.
        Raises RuntimeError if there is no row or no page left."""
        full = parent.computed // PAGE
        copied = self._allocate(1 if parent.computed % PAGE else 0) if self.free_rows else None
        if copied is None:
            raise RuntimeError(f"no room to fork request {parent.name!r}")
        child = self.requests[name] = replace(parent, name=name, tokens=list(parent.tokens), pages=[])
        self.cache.take(parent.pages[:full])
        for source, destination in zip(parent.pages[full:], copied, strict=True):
            self.pool.copy_page(source, destination)
        self._start(child, [*parent.pages[:full], *copied], parent.computed)
        return child

    def roll_back(self, request: Request, tokens: int) -> None:
        """Drops the last tokens of a running request's answer, as after a rejected draft, and their K and V."""
        del request.tokens[max(len(request.tokens) - tokens, request.prompt_tokens) :]
        kept = min(request.computed, len(request.tokens) - 1)
        # A page that others may read is not written again: what is kept of it is computed anew on a page of its own.
        last = request.pages[kept // PAGE] if kept % PAGE else None
        if last is not None and (last in self.cache.hashes or self.allocator.users[last] > 1):
            kept -= kept % PAGE
        self.drop(request, kept)

    def drop(self, request: Request, kept: int) -> None:
        """Only the first ``kept`` tokens of the request have K and V from now on."""
        pages = -(-kept // PAGE)
        self.release(request.pages[pages:])
        del request.pages[pages:]
        request.computed = kept

    def release(self, pages: Sequence[int]) -> None:
        """A request lets go of pages: the last one parks those that are cached and frees the others."""
        users = self.allocator.users
        for page in reversed(pages):
            users[page] = max(users[page] - 1, 0)
        unused = [page for page in reversed(pages) if not users[page]]
        self.cache.park([page for page in unused if page in self.cache.hashes])
        self.allocator.free([page for page in unused if page not in self.cache.hashes])

    def _admit(self, request: Request) -> None:
        pages = self.cache.match(request.keys[:-1], request.salt)
        self.cache.take(pages)
        self._start(request, pages, len(pages) * PAGE)

    def _start(self, request: Request, pages: list[int], computed: int) -> None:
        request.row, request.pages, request.computed = self.free_rows.pop(0), pages, computed
        self.running.append(request)

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        self.drop(request, 0)
        self.free_rows.append(request.row)

    def _schedule(self) -> list[tuple[Request, int]]:
        """Requests and how many tokens to compute of each: of those that prefill, else one of all."""
        prefills = [r for r in self.running if len(r.tokens) - r.computed > 1]
        return self._fitting(prefills) or self._fitting(list(self.running))

    def _fitting(self, requests: Sequence[Request]) -> list[tuple[Request, int]]:
        scheduled: list[tuple[Request, int]] = []
        left = CHUNK
        for request in requests:
            count = min(len(request.tokens) - request.computed, left)
            if count and request in self.running and self._grow(request, request.computed + count):
                scheduled.append((request, count))
                left -= count
        return scheduled

    def _grow(self, request: Request, tokens: int) -> bool:
        """Gives the request pages for ``tokens`` tokens; False if it had to be preempted itself."""
        while (pages := self._allocate(-(-tokens // PAGE) - len(request.pages))) is None:
            # Those that are scheduled already came earlier, so the last one isn't among them.
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        request.pages.extend(pages)
        return True

    def _allocate(self, count: int) -> list[int] | None:
        while len(self.allocator.free_pages) < count:
            if not self.cache.evict():
                return None
        return self.allocator.allocate(count)

    def _batch(self, scheduled: Sequence[tuple[Request, int]]) -> Batch:
        rows = [(request.row, request.computed, count) for request, count in scheduled]
        tokens: list[tuple[int, int, int]] = []
        embeds: list[Tensor | None] = []
        for request, count in scheduled:
            # What is right of them in the row is left from whoever had it before, as in real engines.
            self.block_tables[request.row, : len(request.pages)] = torch.tensor(request.pages, dtype=torch.int32)
            for at in range(request.computed, request.computed + count):
                tokens.append((request.tokens[at], at, request.pages[at // PAGE] * PAGE + at % PAGE))
                embeds.append(request.embeds[at] if request.embeds is not None and at < len(request.embeds) else None)
        if all(count == 1 for _, count in scheduled):
            padding = -len(rows) % ROW_MULTIPLE
            rows += [(0, 0, 0)] * padding
            tokens += [(0, 0, slot) for slot in range(padding)]
        by_row, by_token = (torch.tensor(table, device=self.device).unbind(1) for table in (rows, tokens))
        return Batch([request for request, _ in scheduled], *by_row, self.block_tables[by_row[0]], *by_token, embeds)
