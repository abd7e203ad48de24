"""`Writers`: gives requests small numbers for their slots' records, and the anchors of their prefix hashes."""

import re
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from canary_core.kinds.facts import Facts
from canary_core.ops.hashing import COMMON_ANCHOR, mixed, signed
from canary_core.ops.upload import upload
from canary_core.runtime.identities import Identities, Identity, name_key, told
from canary_core.runtime.streams import BatchRows

if TYPE_CHECKING:
    from canary_core.runtime.contents import Contents

MOST_DIGESTS = 4096
"""Digests of unusual names at hand."""

TRACEPARENT = re.compile("[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
"""A ``traceparent`` of W3C Trace Context: version, trace id, id of the parent's span, flags."""

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
        self._contents: Contents | None = None
        self._anchors: OrderedDict[Key, int] = OrderedDict()
        self._traces: OrderedDict[str, str] = OrderedDict()
        self.anchors_forgotten = 0
        """Requests beyond ``capacity`` with a forgotten identity: their next rows have the common anchor."""
        self._rows: dict[torch.device, BatchRows] = {}
        # The weights with which a request began, for those that began after a change, by the name that is told.
        self._began: dict[str, int] = {}
        self._every = torch.device("cpu"), torch.empty(0, dtype=torch.int64, device="cpu")
        self._common: dict[int, Tensor] = {}

    @property
    def contents(self) -> "Contents":
        """Content in the place of requests' tokens. Loaded with the first use: most engines have none."""
        if self._contents is None:
            from canary_core.runtime.contents import Contents

            self._contents = Contents()
        return self._contents

    @property
    def any_contents(self) -> "Contents | None":
        """`contents`, None as long as there are none."""
        return self._contents

    def id(self, request: str) -> int:
        """Writer id of a request; the same request keeps its id as long as it is remembered."""
        key = self._key(request)
        known = self._ids.get(key)
        if known is not None:
            self._ids.move_to_end(key)
            return known
        if len(self._ids) >= self._capacity:
            _, oldest = self._ids.popitem(last=False)
            self._began.pop(self._names.pop(oldest), None)
            self.forgotten += 1
        if self.identities.weights and key not in self._anchors:
            self.identify(request)
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
        self._rows.clear()
        key = self._key(request)
        self._anchors.pop(key, None)
        if self._traces:
            self._traces.pop(told(request), None)
        if self._began:
            self._began.pop(told(request), None)
        if self._contents is not None:
            self._contents.forget(request)
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
        self._rows.clear()
        key = self._key(request)
        self._anchors.pop(key, None)
        if self.identities.weights:
            self._began[told(request)] = self.identities.weights_of(lora)
        elif lora is cache_salt is extra_key is None:
            # Most requests, and the engine waits for its host where they begin.
            return
        found = self.identities.anchor(lora=lora, cache_salt=cache_salt, extra_key=extra_key)
        if found != COMMON_ANCHOR:
            self._set(key, found)

    def trace(self, request: str, traceparent: str | None) -> None:
        """The request belongs to a trace, by the ``traceparent`` of W3C Trace Context that its client sent; None, or
        anything else: to none. Holds until `forget`, also after the request's end."""
        if traceparent is not None and TRACEPARENT.fullmatch(traceparent):
            self._traces[told(request)] = traceparent
            if len(self._traces) > self._capacity:
                self._traces.popitem(last=False)

    def traces(self, *requests: str | None) -> dict[str, str]:
        """Each of ``requests``, as it is `told`, with its ``traceparent``, where one is known."""
        known = self._traces
        return {name: known[name] for name in requests if name is not None and name in known} if known else {}

    def began(self, request: str) -> int:
        """Number of the last change of the weights, or of the adapter's content, when the request began."""
        return self._began.get(told(request), 0) if self._began else 0

    def changed(self, request: str) -> str | None:
        """The last change of the weights since the request began, or was computed again, in words; None for none, and
        for a request that is not known."""
        if not self.identities.weights or self.known(request) is None:
            return None
        identity = self.identities.of(self.anchor(request)) or Identity()
        last = self.identities.weights_of(identity.lora)
        return self.identities.told_change(last) if last > max(self.began(request), identity.weights) else None

    def go_on(self, request: str, began: int) -> None:
        """The request began with the weights ``began``, under another id or name, and goes on: what it reads may be of
        these or later ones."""
        self._began[told(request)] = began

    def again(self, request: str) -> None:
        """The request is computed again from its first token, as after a preemption: with the present weights."""
        if self.identities.weights:
            identity = self.identities.of(self.anchor(request)) or Identity()
            weights = self.identities.weights_of(identity.lora)
            self._set(self._key(request), self.identities.anchor_of(identity._replace(weights=weights)))

    def anchor(self, request: str) -> int:
        """The start of the request's prefix hash."""
        key = self._key(request)
        found = self._anchors.get(key)
        if found is None:
            return COMMON_ANCHOR
        # A request may run while very many begin and end.
        self._anchors.move_to_end(key)
        return found

    def anchors(self, requests: Sequence[str], device: torch.device) -> Tensor:
        """`BatchView.anchors` of the rows, found without a look as long as no request was identified. The same requests
        as in the last call, in the same order, cost one comparison of lists, others one small copy from pinned memory,
        on the current stream. The result must not be written to."""
        if not self._anchors:
            return self._commons(len(requests), device)
        rows = self._rows.get(device)
        if rows is None:
            rows = self._rows[device] = BatchRows(device)
        return rows.of(requests, lambda: self._made(requests, device))

    def _made(self, requests: Sequence[str], device: torch.device) -> Tensor:
        if self._anchors.keys().isdisjoint(map(self._key, requests)):
            return self._commons(len(requests), device)
        return upload([self.anchor(request) for request in requests], device)

    def carried(self, found: Facts) -> bool:
        """Whether the finding of kind ``prefix`` only says that a request goes on across a change of the weights, or
        may say no more: its slot is not known to have been computed before the weights that the reader began with. The
        engine's policy decides what running requests read and write then."""
        anchors = self.crossed(found)
        if anchors is None or not self.identities.same_but_weights(*anchors):
            return False
        if found.request is not None:
            if self.identities.older(found.step_written or 0, self.began(found.request)):
                return False
            if found.position == 0 and found.request in self._ids:
                # From now on it is judged as of what it holds.
                self._set(found.request, anchors[1])
        return True

    def crossed(self, found: Facts) -> tuple[int, int] | None:
        """The anchors of reader and slot of a finding of kind ``prefix``; None where identities are not known to make
        the difference."""
        should_be, stored, token = found.found_value, found.stored_value, found.stored_token
        if should_be is None or stored is None or token is None:
            return None
        if found.position == 0:
            first = mixed(token, 0)
            return signed(should_be - first), signed(stored - first)
        whose = found.request if found.request is not None else found.stored_request
        return self.identities.pair(COMMON_ANCHOR if whose is None else self.anchor(whose), should_be, stored)

    def _set(self, key: Key, anchor: int) -> None:
        self._rows.clear()
        self._anchors[key] = anchor
        if len(self._anchors) > self._capacity:
            self._anchors.popitem(last=False)
            self.anchors_forgotten += 1

    def _commons(self, rows: int, device: torch.device) -> Tensor:
        """The common anchor of so many rows: the beginning of one tensor, which grows."""
        last, every = self._every
        if last != device or every.shape[0] < rows:
            every = torch.full((max(2 * rows, 256),), COMMON_ANCHOR, dtype=torch.int64, device=device)
            self._every = device, every
            self._common.clear()
        found = self._common.get(rows)
        if found is None:
            found = self._common[rows] = every[:rows]
        return found

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
