"""`Writers`: gives requests small numbers for their slots' records, and the anchors of their prefix hashes."""

from collections import OrderedDict, deque
from collections.abc import Sequence

import torch
from torch import Tensor

from canary_core.ops.upload import upload
from canary_core.runtime.identities import Identities, name_key, told

MOST_DIGESTS = 4096
"""Digests of unusual names at hand."""

Key = str | bytes


class Writers:
    """Request ids ↔ writer ids. Ids count up from 0 and are not reused; the last ``capacity`` names are remembered, as
    they are `told`.

    ``identities``: conditions of requests' computation beside the tokens.
    """

    def __init__(self, capacity: int = 65536) -> None:
        self._capacity = capacity
        self._ids: OrderedDict[Key, int] = OrderedDict()
        self._names: dict[int, str] = {}
        self._digests: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._forgotten: deque[int] = deque()
        self._next = 0
        self.forgotten = 0
        """Names beyond ``capacity``: findings have a number in their place."""
        self.identities = Identities(capacity)
        self._anchors: OrderedDict[Key, int] = OrderedDict()
        self.anchors_forgotten = 0
        """Requests beyond ``capacity`` with a forgotten identity: their next rows have the common anchor."""
        self._last: tuple[list[str], Tensor | None] | None = None

    def id(self, request: str) -> int:
        """Writer id of a request; the same request keeps its id as long as it is remembered."""
        key = self._key(request)
        known = self._ids.get(key)
        if known is not None:
            self._ids.move_to_end(key)
            return known
        if len(self._ids) >= self._capacity:
            _, oldest = self._ids.popitem(last=False)
            del self._names[oldest]
            self.forgotten += 1
        new = self._next
        self._next += 1
        self._ids[key] = new
        self._names[new] = told(request)
        return new

    def known(self, request: str) -> int | None:
        """The present id of a request, None if there is none. Neither gives an id nor counts as a use."""
        return self._ids.get(self._key(request))

    def name(self, writer: int) -> str | None:
        """The request of a writer id, as it is `told`, None if forgotten or never given."""
        return self._names.get(writer)

    @staticmethod
    def told(request: str) -> str:
        """The name by which findings call a request: one printable line, of a long name the start and a digest."""
        return told(request)

    def forget(self, request: str) -> None:
        """Ends the request's history (a fork or a reused name): the next use gets a new id. Slots written under the old
        id keep the name, for the last ``capacity`` requests."""
        self._last = None
        key = self._key(request)
        self._anchors.pop(key, None)
        old = self._ids.pop(key, None)
        if old is None:
            return
        self._forgotten.append(old)
        if len(self._forgotten) > self._capacity:
            del self._names[self._forgotten.popleft()]
            self.forgotten += 1

    def identify(
        self, request: str, *, lora: str | None = None, cache_salt: str | None = None, extra_key: str | None = None
    ) -> None:
        """Sets the conditions of the request's computation beside its tokens, see `Identities.anchor`. Holds until
        `forget`."""
        self._last = None
        key = self._key(request)
        self._anchors.pop(key, None)
        if lora is cache_salt is extra_key is None:
            # Most requests, and the engine waits for its host where they begin.
            return
        found = self.identities.anchor(lora=lora, cache_salt=cache_salt, extra_key=extra_key)
        if found == self.identities.anchor():
            return
        self._anchors[key] = found
        if len(self._anchors) > self._capacity:
            self._anchors.popitem(last=False)
            self.anchors_forgotten += 1

    def anchor(self, request: str) -> int:
        """The start of the request's prefix hash."""
        key = self._key(request)
        found = self._anchors.get(key)
        if found is None:
            return self.identities.anchor()
        # A request may run while very many begin and end.
        self._anchors.move_to_end(key)
        return found

    def anchors(self, requests: Sequence[str], device: torch.device) -> Tensor | None:
        """`BatchView.anchors` of the rows; None where all have the common anchor, found without a look as long as no
        request was identified. The same requests as in the last call, in the same order, cost one comparison of lists,
        others one small copy from pinned memory, on the current stream. The result must not be written to."""
        if not self._anchors:
            return None
        if self._last is None or self._last[0] != requests:
            none = self._anchors.keys().isdisjoint(map(self._key, requests))
            rows = None if none else upload([self.anchor(request) for request in requests], device)
            self._last = list(requests), rows
        return self._last[1]

    def _key(self, request: str) -> Key:
        """`name_key`. A very long name is not hashed in every forward: Python keeps a text's own hash."""
        if request in self._ids:
            return request
        known = self._digests.get((hash(request), len(request)))
        if known is not None:
            return known
        key = name_key(request)
        if isinstance(key, bytes):
            self._digests[hash(request), len(request)] = key
            if len(self._digests) > MOST_DIGESTS:
                self._digests.popitem(last=False)
        return key
