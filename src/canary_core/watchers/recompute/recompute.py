"""`Recompute`: has an engine compute requests in the cache again, and judges them."""

import threading
from collections import deque
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError

import torch

from canary_core.errors import CanaryError, error_text
from canary_core.recomputer import CachedRequest, Recomputer
from canary_core.watchers.recompute.comparison import Comparing, Comparison
from canary_core.watchers.recompute.judge import RecomputeHost, RecomputeJudge
from canary_core.watchers.recompute.noise import Noise
from canary_core.watchers.recompute.verification import Verification

CHUNK_TOKENS = 512
"""Tokens of one forward of a recompute: another path than a decode's, and a bound on the memory."""
ODD_CHUNK_TOKENS, MOST_ODD_CHUNKS = 7, 16
"""The same for another look at a fresh request: how far the engine's own paths are from each other."""


class Recompute:
    """Judges requests in the cache by a second computation of the KV from the tokens.

    Numerical noise is learnt from verified requests without a `Touch`: each is computed again by two paths, and with
    random roundings of all KV read by attention. Before enough such requests were seen nobody is judged. `verify` may
    be called on any thread; the work is done where the engine calls `serve`, between forwards.
    """

    def __init__(self, canary: RecomputeHost, recomputer: Recomputer) -> None:
        self._canary = canary
        self._recomputer = recomputer
        self._asked: deque[tuple[str | None, Future[list[Verification]]]] = deque()
        self._server: int | None = None
        self.judge = RecomputeJudge(canary, lambda: recomputer.rounding)

    @property
    def noise(self) -> Noise:
        """Learnt so far. Read on the engine's thread."""
        return self.judge.noise

    def ask(self, request: str | None = None) -> "Future[list[Verification]]":
        """Asks for `verify`, and does not wait: for any thread."""
        asked: Future[list[Verification]] = Future()
        self._asked.append((request, asked))
        return asked

    def verify(self, request: str | None = None, timeout_s: float = 60.0) -> list[Verification]:
        """Verifies one request, or (None) all with KV in the cache, once the engine is between two forwards. Waits
        at most ``timeout_s`` seconds. Raises `CanaryError` if the engine had no time until then, or the work failed."""
        if threading.get_ident() == self._server:
            return self.now(request)
        asked = self.ask(request)
        try:
            return asked.result(timeout_s)
        except LateError:
            asked.cancel()
            raise CanaryError(
                f"nothing was verified within {timeout_s:g} s: the engine's loop did not come between two forwards; "
                "call verify() while it runs, or give it more time (timeout_s)"
            ) from None

    def serve(self) -> None:
        """Answers all calls of `verify`. On the engine's thread and stream, between forwards; never raises."""
        while self._asked:
            self._server = threading.get_ident()
            request, asked = self._asked.popleft()
            if not asked.set_running_or_notify_cancel():
                continue
            try:
                asked.set_result(self.now(request))
            except Exception as error:
                asked.set_exception(CanaryError(f"the recompute failed: {error_text(error)}"))

    def now(self, request: str | None = None) -> list[Verification]:
        """`verify` at once: on the engine's thread and stream, between forwards. Waits for the device."""
        names = list(self._recomputer.requests()) if request is None else [request]
        return [self._verify(name) for name in names]

    def _verify(self, name: str) -> Verification:
        try:
            cached = self._recomputer.cached(name)
            few = self.judge.too_few(cached)
            if few is not None:
                return few
            self.judge.check_bytes(cached)
            comparison = self._compare(cached, CHUNK_TOKENS)
            answer = self.judge.verdict(cached, comparison)
            if self.judge.teaches(cached, comparison):
                odd = max(ODD_CHUNK_TOKENS, -(-len(cached.tokens) // MOST_ODD_CHUNKS) | 1)
                rounded = self._compare(cached, CHUNK_TOKENS, self._recomputer.rounding)
                self.noise.learn([comparison.errors, self._compare(cached, odd).errors], rounded.errors)
            return answer
        except CanaryError as error:
            return self.judge.unjudged(name, str(error))
        except torch.OutOfMemoryError:
            return self.judge.unjudged(name, "the device has no memory for a second computation of this request")

    def _compare(self, cached: CachedRequest, chunk_tokens: int, jitter: float = 0.0) -> Comparison:
        return Comparing(self._canary, cached, self._recomputer.compute(cached, chunk_tokens, jitter)).result()
