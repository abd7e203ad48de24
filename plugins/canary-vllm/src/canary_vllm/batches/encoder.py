"""`EncoderReads`: cross-attention, whose K and V are of an encoder's states."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from canary_adapters import BatchRows, block_table, media_number, token_table, upload
from canary_core import BatchView, Canary, Overlap
from canary_vllm.batches.forward import Prepared
from canary_vllm.batches.requests import Requests
from canary_vllm.compat import runners
from canary_vllm.pools.pool import Group


class EncoderReads:
    """The groups of cross-attention; nothing is done without any. A request's first forward writes K and V of all its
    states, and each later one reads them all; positions count states. So a forward is followed by a step of these
    groups alone.

    In the place of a token, a state has a number of its input, by vLLM's own identifier in the scheduler's message: so
    an answer that goes on with another input is found. That the encoder has computed this input is not looked at.
    """

    def __init__(self, canary: Canary, runner: Any, groups: Sequence[Group], requests: Requests) -> None:
        self._canary = canary
        self._runner = runner
        self._groups = groups
        self._requests = requests
        self._inputs: dict[str, Tensor] = {}
        self._view: BatchView | None = None
        self._known = BatchRows(canary.device)
        self._none = torch.zeros(int(runner.max_num_reqs), dtype=torch.int32, device=canary.device)
        self._empty = torch.empty(0, dtype=torch.int64, device=canary.device)

    def notice(self, output: Any) -> None:
        """Takes the scheduler's message for the next forward."""
        for name in output.finished_req_ids:
            self._inputs.pop(name, None)
        for new in output.scheduled_new_reqs if self._groups else ():
            features = getattr(new, "mm_features", None) or ()
            numbers = [n for f in features for n in [media_number(f.identifier)] * int(f.mm_position.length)]
            self._inputs[new.req_id] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
            # Another request may have had this name.
            self._known.clear()

    def begin(self, prepared: Prepared | None = None) -> None:
        """The forward of the ``prepared`` batch (V2), or of the runner's own (V1), comes next. An audit expects its
        writes."""
        self._view = None
        if not self._groups:
            return
        with self._canary.guard("encoder"):
            self._view = self._batch(prepared)
            if self._view is not None:
                self._canary.audit.claim_writes(self._view)

    def end(self) -> None:
        """The step of the forward that has just been issued. Raises `ViolationError` in raise mode."""
        view, self._view = self._view, None
        if view is not None:
            self._canary.step.run(lambda: None, lambda: view, overlap=Overlap.NONE)

    def _batch(self, prepared: Prepared | None) -> BatchView | None:
        inputs = self._runner.input_batch if prepared is None else prepared.batch
        rows = int(inputs.num_reqs)
        names = inputs.req_ids[:rows]
        if not rows or not self._canary.enabled:
            return None
        device, lens = self._canary.device, runners.encoder_lens(self._runner)
        if prepared is None:
            computed = inputs.num_computed_tokens_cpu
            blocks: Sequence[Tensor] = [table.block_table.gpu for table in inputs.block_table.block_tables]
        else:
            computed, blocks = inputs.num_computed_tokens_np, prepared.block_tables
        begins = computed[:rows] == 0
        prefix, first, tokens = lens[:rows], self._none[:rows], self._empty
        if begins.any():
            first = upload(begins.tolist(), device, torch.int32) * prefix
            prefix = prefix - first
            new = [self._inputs[name] for name, b in zip(names, begins, strict=True) if b and name in self._inputs]
            tokens = upload(torch.cat(new), device) if new else tokens
        tables = {g.region: block_table(blocks[g.number][:rows], g.page) for g in self._groups}
        expected = self._known.of(names, lambda: self._expected(names))
        return self._requests.view(names, (prefix, first), (tokens, expected), tables)

    def _expected(self, names: Sequence[str]) -> Tensor:
        own = [self._inputs.get(name) for name in names]
        return token_table(own, max([1, *(len(one) for one in own if one is not None)]), self._canary.device)
