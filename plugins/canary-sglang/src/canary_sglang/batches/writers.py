"""`RequestWriters`: writer ids of a batch's requests, on the device, without work where the batch is the one before."""

import operator
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from canary_core import Writers


class RequestWriters:
    """The same requests in the same order, as in decode, cost one comparison of lists; others one small copy from
    pinned memory. Made when the forward is issued, on its stream, so that no later batch can overtake it."""

    def __init__(self, writers: Writers, device: torch.device) -> None:
        self.writers = writers
        self._device = device
        self._requests: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self._noticed: list[ref[Any]] = []
        self._names: list[str] = []
        self._ids = torch.empty(0, dtype=torch.int32, device=device)

    def notice(self, requests: Sequence[Any]) -> None:
        """SGLang's `Req` objects of the next forward. A known name under a new object is another request: what is
        remembered of the old one does not hold for it."""
        known = [noticed() for noticed in self._noticed]
        if len(known) == len(requests) and all(map(operator.is_, known, requests)):
            return
        self._noticed = [ref(request) for request in requests]
        for request in requests:
            if self._requests.get(request.rid) is not request:
                self._requests[request.rid] = request
                self.writers.forget(request.rid)
                self._names = []

    def request(self, name: str) -> Any | None:
        """The `Req` object of a name, if it was noticed and still exists."""
        return self._requests.get(name)

    def id(self, name: str) -> int:
        """Writer id of one request."""
        return self.writers.id(name)

    def repeated(self, names: Sequence[str], counts: Sequence[int]) -> Tensor:
        """Writer ids, each ``counts`` times, int32 ``[sum(counts)]``; on the current stream."""
        return self.spread([self.writers.id(name) for name in names], counts)

    def spread(self, ids: Sequence[int], counts: Sequence[int]) -> Tensor:
        """As `repeated`, of writer ids."""
        host = torch.tensor(ids, dtype=torch.int32).repeat_interleave(torch.tensor(counts))
        return (host.pin_memory() if self._device.type == "cuda" else host).to(self._device, non_blocking=True)

    def ids(self, names: Sequence[str]) -> Tensor:
        """Writer ids, int32 ``[len(names)]``. Not to be written to."""
        if names != self._names:
            self._names = list(names)
            ids = [self.writers.id(name) for name in names]
            host = torch.tensor(ids, dtype=torch.int32, pin_memory=self._device.type == "cuda")
            self._ids = host.to(self._device, non_blocking=True)
        return self._ids
