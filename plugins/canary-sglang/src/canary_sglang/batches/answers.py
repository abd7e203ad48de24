"""`Answers`: whether the tokens in a request's own list, sent to its client, are the sampled ones."""

from collections.abc import Callable, Collection, Sequence
from typing import Any
from weakref import ref

from torch import Tensor

from canary_core import Canary, HostCopy, Kind, Phase, Violation

MOST_WAITING = 8
"""Most batches with results not yet processed; more are given up, and counted as ``answers_left``."""


class Answers:
    """Copies a batch's sampled tokens to the host, beside SGLang's own copy, and compares them with those appended by
    SGLang to the requests' lists while processing the batch's result. The host waits for nothing: a late copy is not
    compared.

    On a GPU in log mode every ``CANARY_READ_INTERVAL``-th batch is compared, else each.
    """

    def __init__(self, canary: Canary) -> None:
        self._canary = canary
        self._begun: tuple[HostCopy, Collection[int]] | None = None
        self._waiting: dict[int, tuple[ref[Any], HostCopy, Collection[int]]] = {}
        self._batches = 0

    def begin(self) -> None:
        """A batch runs next. Tokens sampled after the issue of the one before, as with a grammar under the overlap
        scheduler, belong to no known result, and are not compared."""
        self._begun = None

    def sampled(self, tokens: Tensor, without: Collection[int] = ()) -> None:
        """Sampled tokens of the running batch: ``[rows]`` or ``[rows, n]``, see `SampledTokens.give`."""
        canary = self._canary
        self._batches += 1
        seldom = canary.device.type != "cpu" and canary.mode != "raise"
        if seldom and self._batches % canary.config.read_interval:
            return
        self._begun = HostCopy(tokens if tokens.is_cuda else tokens.clone()), without

    def issued(self, result: Any) -> None:
        """The batch has run; ``result`` is its `GenerationBatchResult`."""
        begun, self._begun = self._begun, None
        if begun is not None and result is not None:
            # It has what the model gave, on the device; under pipeline parallelism another one is processed.
            self._waiting[id(result)] = (ref(result), *begun)
            if len(self._waiting) > MOST_WAITING:
                del self._waiting[next(iter(self._waiting))]
                self._canary.count("answers_left")

    def processed(self, process: Callable[[], Any], batch: Any, result: Any) -> Any:
        """Runs ``process``, which appends the tokens of ``result`` to the lists of the batch's requests."""
        waiting = self._waiting.pop(id(result), None)
        if waiting is None or waiting[0]() is not result or not self._canary.enabled:
            return process()
        _, copy, without = waiting
        requests, before = [], []
        with self._canary.guard("answers"):
            requests = list(batch.reqs)
            before = [len(request.output_ids) for request in requests]
        done = process()
        with self._canary.guard("answers"):
            (tokens,) = copy.tensors
            if copy.arrived() and tokens.shape[0] == len(requests):
                after = [len(request.output_ids) for request in requests]
                self._canary.count("answered_tokens", sum(after) - sum(before))
                if not (tokens.dim() == 1 and _in_order(requests, before, after, tokens.tolist())):
                    self._compare(requests, before, tokens.view(len(requests), -1).tolist(), without)
        return done

    def _compare(
        self, requests: Sequence[Any], before: Sequence[int], given: Sequence[list[int]], without: Collection[int]
    ) -> None:
        wrong = [
            (request, first + i, sampled, int(listed))
            for row, (request, first, tokens) in enumerate(zip(requests, before, given, strict=True))
            if row not in without
            for i, (sampled, listed) in enumerate(zip(tokens, request.output_ids[first:], strict=False))
            if sampled != listed
        ]
        if wrong:
            region = next(iter(self._canary.regions))
            self._canary.report(
                [
                    Violation(
                        Kind.TOKEN,
                        region,
                        Phase.EVENT,
                        self._canary.forwards,
                        position=len(request.origin_input_ids) + place,
                        token=listed,
                        stored_token=sampled,
                        request=request.rid,
                        rank=self._canary.config.rank,
                    )
                    for request, place, sampled, listed in wrong
                ]
            )


def _in_order(requests: Sequence[Any], before: Sequence[int], after: Sequence[int], given: Sequence[int]) -> bool:
    """Whether each of ``requests`` got exactly its ``given`` token, as usual: seen in a few lists of a batch's
    length."""
    if after != [length + 1 for length in before]:
        return False
    return [request.output_ids[-1] for request in requests] == given
