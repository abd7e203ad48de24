"""`Verifier`: has requests of one cache computed again, between two forwards of the engine's own loop."""

import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from canary_adapters import NOT_REMEMBERED
from canary_core import Canary, CanaryError, Patches, Touch, Verification, may_recompute
from canary_transformers.continuous import compat, parked
from canary_transformers.continuous.recompute import ContinuousRecomputer

if TYPE_CHECKING:
    from canary_core import Recompute

NOT_WANTED = "that takes CANARY_CONTROL=write or CANARY_RECOMPUTE when the manager starts"


class Verifier:
    """Follows where the content of requests comes from, and serves `verify` and ``CANARY_RECOMPUTE``. Without these
    nothing is computed.

    model: gives the model, None before the first forward.
    """

    def __init__(
        self, canary: Canary, processor: Any, groups: Sequence[compat.KVGroup], model: Callable[[], Any]
    ) -> None:
        self._canary = canary
        self._processor = processor
        self._recomputer = ContinuousRecomputer(processor, groups, model)
        self._recompute: Recompute | None = None
        self._not_parked = parked.unable(processor, groups) if may_recompute(canary.config) else NOT_WANTED
        self._parked: parked.LedgerPrefixes | None = None
        if self._not_parked is None:
            own = self._recomputer, lambda: self.recompute
            self._parked = parked.LedgerPrefixes(canary, processor, groups[0], *own)
        canary.verifier = self
        if canary.config.recompute:
            _ = self.recompute

    @property
    def recompute(self) -> "Recompute":
        """Made on first use."""
        if self._recompute is None:
            from canary_core import Recompute

            self._recompute = Recompute(self._canary, self._recomputer)
        return self._recompute

    def verify(self, request: str | None, timeout_s: float, parked: bool = False) -> list[Verification]:
        """See `Recompute.verify`; ``parked``: prefixes of ended requests, not on the engine's thread. Raises
        `CanaryError` where nothing is guarded any more."""
        if not self._canary.enabled:
            raise CanaryError("nothing is verified here any more: an error switched Canary off, or it was closed")
        if not parked:
            return self.recompute.verify(request, timeout_s)
        asked = self.ask(request, parked=True)
        try:
            return asked.result(timeout_s)
        except LateError:
            asked.cancel()
            raise CanaryError(
                f"not all was verified within {timeout_s:g} s: one prefix is computed between two forwards; give it "
                "more time (timeout_s)"
            ) from None

    def ask(self, request: str | None = None, parked: bool = False) -> "Future[list[Verification]]":
        """See `Verifier.ask` of the core."""
        if not parked:
            return self.recompute.ask(request)
        if self._parked is not None:
            return self._parked.asked.put(request)
        refused: Future[list[Verification]] = Future()
        refused.set_exception(CanaryError(NOT_REMEMBERED.format(why=self._not_parked)))
        return refused

    def close(self) -> None:
        """Fails all asks for parked prefixes."""
        if self._parked is not None:
            self._parked.close()

    def follow(self, patches: Patches, on_stream: AbstractContextManager[object]) -> None:
        """Hooks the engine's search for prefixes, its forks, and its loop. ``on_stream``: a context on the stream of
        forwards, to be entered again and again."""
        cache = self._processor.cache
        if self._parked is not None:
            self._parked.follow(patches)
        if hasattr(cache, "search_prefix_match"):
            patches.follow(cache, "search_prefix_match", self._hit)
        if hasattr(cache, "prepare_fork_request"):
            patches.follow(cache, "prepare_fork_request", self._forked)

        def between(original: Callable[[], bool]) -> Callable[[], bool]:
            @functools.wraps(original)
            def prepare_next_batch() -> bool:
                # Afterwards requests count tokens of the next batch, which are not computed yet.
                if self._recompute is not None and self._canary.enabled:
                    with on_stream:
                        self._recompute.serve()
                if self._parked is not None and self._canary.enabled and self._parked.due:
                    with on_stream:
                        self._parked.serve()
                return original()

            return prepare_next_batch

        patches.wrap(self._processor, "prepare_next_batch", between)

    def arrived(self, request: str, tokens: int) -> None:
        """So many tokens of a request came back from host memory."""
        self._recomputer.touched(request, Touch("arrival", tokens))

    def _hit(self, tokens: int, request_id: str, *args: Any, **kwargs: Any) -> None:
        """The prefix cache was searched for a request that begins, and has so many of its tokens."""
        self._recomputer.began(request_id)
        if tokens:
            self._recomputer.touched(request_id, Touch("hit", tokens))

    def _forked(self, forked: Iterable[str] | None, original: Any, *args: Any, **kwargs: Any) -> None:
        for name in forked or ():
            self._recomputer.began(name)
            self._recomputer.touched(name, Touch("fork", original.position_offset))
