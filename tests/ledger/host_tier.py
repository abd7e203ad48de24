"""A host tier under the toy engine, from outside: it stores blocks of KV by the tokens up to their end and brings them
back to other slots, as a connector does, and tells the ledger what a plugin would."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from support.guarded import Guarded
from support.toy import Request, ToyEngine
from torch import Tensor

from canary_core import Arrival, Origin

PAGE = 4
Stored = list[Tensor]
"""The bytes of a block: of each source, ``[PAGE, row]``."""


@dataclass
class HostTier:
    """``stored``: blocks by all tokens up to their end."""

    g: Guarded
    origin: Origin = field(default_factory=lambda: Origin("tier"))
    stored: dict[tuple[int, ...], Stored] = field(default_factory=dict)

    @classmethod
    def make(cls, *, origin: Origin | None = None, engine: ToyEngine | None = None, **settings: object) -> "HostTier":
        g = Guarded(engine or ToyEngine(slots=128), **settings)
        return cls(g, origin or Origin("tier"))

    @property
    def tensors(self) -> list[Tensor]:
        return [t for pair in zip(self.g.engine.k, self.g.engine.v, strict=True) for t in pair]

    def compute(self, tokens: list[int], name: str = "first") -> Request:
        """Forwards of ``tokens``, until all of them are cached."""
        request = self.g.engine.submit(name, tokens)
        while request.cached < len(tokens):
            self.g.step()
        return request

    def save(self, request: Request, keep: bool = True) -> Request:
        """Stores the complete blocks of ``request``, and gives it back."""
        slots = self.on_device(request.slots[: request.cached // PAGE * PAGE])
        for block in range(len(slots) // PAGE):
            of = slots[block * PAGE : (block + 1) * PAGE]
            self.stored[tuple(request.tokens[: (block + 1) * PAGE])] = [t[of].clone() for t in self.tensors]
        if keep:
            self.g.canary.ledger.keep("full", slots, PAGE)
        return request

    def finish(self, request: Request) -> None:
        self.g.engine.finish(request)

    def claim(self, tokens: list[int], name: str = "again", cached: int | None = None) -> tuple[Request, Arrival]:
        """A request whose first ``cached`` tokens (all complete blocks but the last token's) are stored."""
        if cached is None:
            cached = (len(tokens) - 1) // PAGE * PAGE
        request = self.g.engine.submit(name, tokens)
        request.slots = [self.g.engine.free.pop(0) for _ in range(cached)]
        request.cached = cached
        writer = self.g.engine.writers.id(name)
        slots = self.on_device(request.slots)
        return request, Arrival("full", slots, tokens[:cached], self.origin, PAGE, writer=writer)

    def copy(self, request: Request, fault: Callable[[int, int, Tensor], Tensor] | None = None) -> None:
        """The bytes of all blocks that ``request`` found come to its slots. ``fault(block, source, bytes)`` gives other
        ones."""
        for block in range(request.cached // PAGE):
            of = self.on_device(request.slots[block * PAGE : (block + 1) * PAGE])
            stored = self.stored[tuple(request.tokens[: (block + 1) * PAGE])]
            for source, (tensor, data) in enumerate(zip(self.tensors, stored, strict=True)):
                tensor[of] = data if fault is None else fault(block, source, data.clone())

    def load(
        self, tokens: list[int], fault: Callable[[int, int, Tensor], Tensor] | None = None, name: str = "again"
    ) -> Request:
        """A request that finds its prefix in the tier; the bytes come before its first forward."""
        request, arrival = self.claim(tokens, name)
        self.copy(request, fault)
        self.g.canary.ledger.arrive(arrival)
        self.g.step()
        return request

    def on_device(self, slots: list[int]) -> Tensor:
        """Where the pool is."""
        return torch.tensor(slots, dtype=torch.int64, device=self.g.engine.device)

    def counts(self, *names: str) -> list[int]:
        """Counters of the ledger, now."""
        self.g.canary.drain()
        stats = self.g.canary.stats()
        return [stats.get(f"ledger_{name}", 0) for name in names]
