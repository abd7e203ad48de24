"""`Requests`: a runner's requests, known from the scheduler's own messages."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from canary_adapters import BatchRows, BlockMessage, EmbeddedRequests, Prompts, RequestBlocks, upload
from canary_core import BatchView, SlotTable, Writers
from canary_vllm.batches import contents
from canary_vllm.weights import adapter_name


class Requests:
    """Names, writer ids and prompts of the requests sent by the scheduler to the worker.

    Nothing comes from the runner, the subject of a check: prompts are those of `SchedulerOutput`.
    """

    def __init__(self, writers: Writers, device: torch.device) -> None:
        self.writers = writers
        self._device = device
        self.prompts = Prompts(device)
        self.blocks = RequestBlocks()
        self.embedded = EmbeddedRequests()
        self._live: set[str] = set()
        self._begun: dict[str, tuple[str | None, str | None, int | None]] = {}
        self._ids = BatchRows(device)

    def notice(self, output: Any, message: BlockMessage | None = None) -> None:
        """Takes the scheduler's output for the next forward; ``message``: of blocks, from the same output."""
        for name in output.finished_req_ids:
            self.prompts.drop(name)
            self.blocks.drop(name)
            self._live.discard(name)
        self._begun.clear()
        cached = output.scheduled_cached_reqs
        for name, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if more is not None:
                (self.blocks.give if name in cached.resumed_req_ids else self.blocks.extend)(name, more)
        for name in cached.resumed_req_ids:
            self.prompts.again(name)
            self.writers.again(name)
        # Of a worker with an older Canary, which is told, it has less.
        traces, salts = (getattr(message, about, {}) for about in ("traces", "salts"))
        for new in output.scheduled_new_reqs:
            name = new.req_id
            self.blocks.give(name, new.block_ids)
            # Another request may have had this name; a session's next turn drops the end of its last answer.
            began = self.writers.began(name) if name in self._live else None
            self._live.add(name)
            self.writers.forget(name)
            self._ids.clear()
            if name in traces:
                self.writers.trace(name, traces[name])
            self._begun[name] = adapter_name(new.lora_request), salts.get(name), began
            if getattr(new, "prompt_embeds", None) is not None:
                self.embedded.add(name)
            prompt = contents.prompt(self.writers, name, new)
            if prompt is not None:
                self.prompts.give(name, prompt)
        self.identify()
        for load in getattr(message, "loads", ()):
            if load.request not in self._live:
                # It waits for its KV, and begins once that is there.
                self.writers.identify(load.request, lora=load.lora, cache_salt=load.cache_salt)

    def identify(self) -> None:
        """Tells what the requests that begin with the last message are computed with. Those that V2 sends again, as
        after a preemption, began before."""
        for name, (lora, salt, began) in self._begun.items():
            self.writers.identify(name, lora=lora, cache_salt=salt)
            if began is not None:
                self.writers.go_on(name, began)

    def tokens(
        self, names: Sequence[str], computed: Callable[[], Sequence[int]], new: Sequence[int], token_ids: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """A forward's `BatchView.token_ids`, with numbers in the place of ``token_ids`` that stand for content, and
        `BatchView.expected_tokens`. ``computed``, ``new``: as of `Prompts.table`."""
        expected, known = self.prompts.table(names, computed, new), self.writers.any_contents
        if expected is not None and known is not None:
            token_ids = known.given(names, computed(), new, token_ids)
        return token_ids, expected

    def view(
        self, names: Sequence[str], lengths: tuple[Tensor, Tensor], tokens: tuple[Tensor, Tensor | None],
        tables: Mapping[str, SlotTable], positions: Tensor | None = None,
    ) -> BatchView:  # fmt: skip
        """A forward of ``names``. ``lengths``: prefix and new. ``tokens``: of `tokens`. Others: as of `BatchView`."""
        anchors = self.writers.anchors(names, lengths[0].device)
        return BatchView(*lengths, tokens[0], self.ids(names), tables, positions, tokens[1], anchors)

    def ids(self, names: Sequence[str]) -> Tensor:
        """Writer ids of ``names``, int32 ``[len(names)]``; on the current stream. Must not be written to. The requests
        of the batch before in the same order, as in decode, cost one comparison of lists."""
        return self._ids.of(names, lambda: upload([self.writers.id(n) for n in names], self._device, torch.int32))
