"""`SampledRows`: output of SGLang's sampler, in the form of `Canary.sampled`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from canary_core import Canary
from canary_sglang.batches.answers import Answers
from canary_sglang.batches.writers import RequestWriters
from canary_sglang.compat import schedulers


class SampledRows:
    """Gives the sampled tokens of the last guarded forward's batch to ``canary``, row by row. On the stream of the
    forwards; the host waits for nothing.

    Left out are rows whose next token is decided elsewhere: prompts in the middle, and beams. Where rows can't be
    matched with the forward's, as under pipeline parallelism, nothing is given.
    """

    def __init__(self, canary: Canary, writers: RequestWriters) -> None:
        self._canary = canary
        self._writers = writers
        self.answers = Answers(canary)
        self._batch: Any = None
        self._names: list[str] = []
        self._beams: tuple[int, ...] = ()

    def forward(self, batch: Any) -> None:
        """The forward of a `ForwardBatch` was guarded; its tokens are sampled next."""
        self._batch = batch

    def after(self, batch: Any, tokens: Any) -> None:
        """`ModelRunner.sample` gave ``tokens`` for ``batch``, one a row."""
        guarded, self._batch = self._batch, None
        if batch is not guarded or not isinstance(tokens, Tensor) or tokens.dim() != 1:
            return
        if not self._canary.sampled.followed:
            return
        with self._canary.guard("sampled tokens"):
            names = batch.rids
            if names and tokens.shape[0] == len(names):
                without = self._without(batch, names)
                self._canary.sampled.give(tokens, without)
                self.answers.sampled(tokens, without)

    def verified(self, batch: Any, result: Any) -> None:
        """Drafted tokens were verified: ``result`` has the target's own tokens for the positions after them, as many as
        counted by `GenerationBatchResult.accept_lens`. ``batch``: the `ScheduleBatch`."""
        if not self._canary.sampled.followed:
            return
        with self._canary.guard("verified tokens"):
            rows, tokens, accepted = len(batch.reqs), result.next_token_ids, result.accept_lens
            if not rows or accepted is None or tokens.shape[0] % rows:
                return
            tokens = tokens.view(rows, -1)
            column = torch.arange(tokens.shape[1], device=tokens.device)
            tokens = torch.where(column < accepted[:, None], tokens, -1)
            self._canary.sampled.give(tokens)
            self.answers.sampled(tokens)

    def _without(self, batch: Any, names: Sequence[str]) -> tuple[int, ...]:
        """Rows of ``batch`` whose sampled token is not the request's next one."""
        requests: Sequence[Any] = ()
        if names != self._names:
            self._names = list(names)
            requests = self._writers.requests(names)
            self._beams = tuple(i for i, r in enumerate(requests) if r is None or schedulers.searches_beams(r))
        prefixes, news = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
        if batch.forward_mode.is_decode() or prefixes is None or news is None:
            return self._beams
        begun = tuple(
            i
            for i, (request, prefix, new) in enumerate(
                zip(requests or self._writers.requests(names), prefixes, news, strict=True)
            )
            if _unfinished(request, int(prefix) + int(new))
        )
        return (*self._beams, *begun)


def _unfinished(request: Any | None, computed: int) -> bool:
    """Whether a request has tokens beyond the computed ones: they come next."""
    return request is None or computed < len(request.origin_input_ids) + len(request.output_ids)
