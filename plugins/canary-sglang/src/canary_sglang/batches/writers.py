"""`RequestWriters`: writer ids of a batch's requests, on the device."""

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import numpy as np
import torch
from torch import Tensor

from canary_adapters import BatchRows, EmbeddedRequests, put_embeddings, upload
from canary_core import Writers
from canary_sglang.batches.tokens import folded
from canary_sglang.compat import schedulers


class RequestWriters:
    """Writer ids of a batch's requests. The same requests as in the batch before, in the same order, as in decode, cost
    one comparison of lists; others one small copy from pinned memory. To be asked when the forward is issued, on its
    stream, so that the ids belong to the same batch and not to a later one.

    ``adapters``: whether LoRA adapters tell requests apart; not where records come from another engine, with other ids
    for the same adapters. ``embedded``: requests with embeddings in the place of tokens.
    """

    def __init__(self, writers: Writers, device: torch.device, adapters: bool = True) -> None:
        self.writers = writers
        self.embedded = EmbeddedRequests()
        self._adapters = adapters
        self._device = device
        self._requests: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self._noticed: list[ref[Any]] = []
        # Names that several requests of the batch have, so that they say nothing.
        self._doubled: frozenset[str] = frozenset()
        # The identity of the first request of each streaming session.
        self._sessions: WeakKeyDictionary[Any, dict[str, str | None]] = WeakKeyDictionary()
        self._ids = BatchRows(device)

    def notice(self, requests: Sequence[Any]) -> None:
        """Takes SGLang's `Req` objects of the next forward. A new object with a known name is another request, so the
        writer of the old one is forgotten."""
        known = [noticed() for noticed in self._noticed]
        if len(known) == len(requests) and all(map(operator.is_, known, requests)):
            return
        self._noticed = [ref(request) for request in requests]
        names = [request.rid for request in requests]
        # Names are counted only where one is there twice.
        times = Counter(names) if len(set(names)) < len(names) else {}
        self._doubled = frozenset(name for name, count in times.items() if count > 1)
        for request in requests:
            if self._requests.get(request.rid) is not request:
                self._requests[request.rid] = request
                self.writers.forget(request.rid)
                self.writers.trace(request.rid, schedulers.traceparent(request))
                self._ids.clear()
                self._identify(request)
                if schedulers.embedded(request):
                    self.embedded.add(request.rid)
                self._put_contents(request)

    def _identify(self, request: Any) -> None:
        identity = schedulers.identity(request, self._adapters)
        session = schedulers.streaming_session(request)
        if session is not None:
            # Its requests go on from each other's slots, whatever salt and key each of them brings.
            identity = {**self._sessions.setdefault(session, identity), "lora": identity.get("lora")}
        self.writers.identify(request.rid, **identity)

    def _put_contents(self, request: Any) -> None:
        """Takes the request's content in the place of tokens. Whole prompts of embeddings need the prefix cache off."""
        given = schedulers.overrides(request)
        if given is not None:
            put_embeddings(self.writers, request.rid, given.positions, given.embeds)
        for first, numbers, name in schedulers.media(request):
            content = torch.from_numpy(folded(np.array(numbers, dtype=np.int64)))
            self.writers.contents.put(request.rid, first, content, name)

    def request(self, name: str) -> Any | None:
        """The `Req` object with the name, None if unknown, gone, or not unique."""
        return None if name in self._doubled else self._requests.get(name)

    def requests(self, names: Sequence[str]) -> list[Any | None]:
        """As `request`, of each of ``names``."""
        return [self.request(name) for name in names] if self._doubled else list(map(self._requests.get, names))

    def id(self, name: str) -> int:
        """Writer id of one request."""
        return self.writers.id(name)

    def repeated(self, names: Sequence[str], counts: Sequence[int]) -> Tensor:
        """Writer ids of ``names``, each repeated ``counts`` times, int32 ``[sum(counts)]``; on the current stream."""
        return self.spread([self.writers.id(name) for name in names], counts)

    def spread(self, ids: Sequence[int], counts: Sequence[int]) -> Tensor:
        """As `repeated`, for writer ids instead of names."""
        # A fifth of what torch takes for it; the device waits for this code where requests begin and end.
        return upload(torch.from_numpy(np.repeat(np.array(ids, dtype=np.int32), counts)), self._device)

    def each(self, ids: Sequence[int], counts: Sequence[int]) -> int | Callable[[], Tensor]:
        """Owner of slots, ``counts`` of them for each of writer ``ids``: the id if all are the same, else a function
        that returns one for each slot."""
        return ids[0] if len(set(ids)) == 1 else partial(self.spread, ids, counts)

    def anchors(self, names: Sequence[str]) -> Tensor:
        """`Writers.anchors` of ``names``."""
        return self.writers.anchors(names, self._device)

    def ids(self, names: Sequence[str]) -> Tensor:
        """Writer ids of ``names``, int32 ``[len(names)]``; on the current stream. Must not be written to."""
        return self._ids.of(names, lambda: self._made(names))

    def _made(self, names: Sequence[str]) -> Tensor:
        ids = [-1 if name in self._doubled else self.writers.id(name) for name in names]
        return upload(ids, self._device, torch.int32)
