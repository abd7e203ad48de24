"""`Writers`: gives requests the small numbers under which their slots are remembered."""

from collections import OrderedDict, deque

from canary_core.identities import Identities


class Writers:
    """Request ids ↔ writer ids. Ids count up from 0 and are not reused; the last ``capacity`` names are remembered.

    ``identities``: of what sort requests are, for `BatchView.anchors`."""

    def __init__(self, capacity: int = 65536) -> None:
        self._capacity = capacity
        self._ids: OrderedDict[str, int] = OrderedDict()
        self._names: dict[int, str] = {}
        self._forgotten: deque[int] = deque()
        self._next = 0
        self.identities = Identities(capacity)

    def id(self, request: str) -> int:
        """Writer id of a request; the same request gets the same id as long as it is remembered."""
        known = self._ids.get(request)
        if known is not None:
            self._ids.move_to_end(request)
            return known
        if len(self._ids) >= self._capacity:
            _, oldest = self._ids.popitem(last=False)
            del self._names[oldest]
        new = self._next
        self._next += 1
        self._ids[request] = new
        self._names[new] = request
        return new

    def known(self, request: str) -> int | None:
        """The id that the request has now, None if it has none. Gives it none, and doesn't count as a use."""
        return self._ids.get(request)

    def name(self, writer: int) -> str | None:
        """The request of a writer id, None if it was forgotten or never given."""
        return self._names.get(writer)

    def forget(self, request: str) -> None:
        """The request's history no longer holds (a fork or a reused name): it gets a new id next time. What it wrote
        under the old one keeps its name, for the last ``capacity`` of them."""
        old = self._ids.pop(request, None)
        if old is None:
            return
        self._forgotten.append(old)
        if len(self._forgotten) > self._capacity:
            del self._names[self._forgotten.popleft()]
