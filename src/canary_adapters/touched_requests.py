"""`TouchedRequests`: running requests whose KV is not all computed by themselves, once."""

from canary_core import Touch


class TouchedRequests:
    """Tokens of a scheduler's requests that came from elsewhere, or were computed more than once."""

    def __init__(self) -> None:
        self._touches: dict[str, list[Touch]] = {}
        self._brought: dict[str, int] = {}

    def brought(self, name: str, first: int) -> None:
        """Tokens before a request's begin are brought by a connector, from position ``first`` on."""
        self._brought[name] = first

    def began(self, name: str, hit: int, again: int = 0) -> None:
        """A request begins, with ``hit`` tokens in the cache. After a preemption ``again`` tokens come again."""
        touches = self._touches.setdefault(name, []) if hit or again else []
        if again:
            touches.append(Touch("preemption", again))
        found = min(hit, self._brought.pop(name, hit))
        if found:
            touches.append(Touch("hit", found))
        if hit > found:
            touches.append(Touch("arrival", hit))

    def ended(self, name: str) -> None:
        """The request has ended."""
        self._touches.pop(name, None)
        self._brought.pop(name, None)

    def of(self, name: str) -> tuple[Touch, ...]:
        """The touches of a request, in order of time."""
        return tuple(self._touches.get(name, ()))
