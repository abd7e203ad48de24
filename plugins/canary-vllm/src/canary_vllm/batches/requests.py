"""`Requests`: a runner's requests, known from the scheduler's own messages."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from canary_adapters import EmbeddedRequests, Prompts, RequestBlocks, upload
from canary_core import Writers
from canary_vllm.allocator import messages


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
        self._names: list[str] = []
        self._ids = torch.empty(0, dtype=torch.int32, device=device)

    def notice(self, output: Any) -> None:
        """Takes the scheduler's message for the next forward."""
        for name in output.finished_req_ids:
            self.prompts.drop(name)
            self.blocks.drop(name)
        cached = output.scheduled_cached_reqs
        for name, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if more is not None:
                (self.blocks.give if name in cached.resumed_req_ids else self.blocks.extend)(name, more)
        for name in cached.resumed_req_ids:
            self.prompts.again(name)
        for new in output.scheduled_new_reqs:
            self.blocks.give(new.req_id, new.block_ids)
            # Another request may have had this name; a session's next turn drops the end of its last answer.
            self.writers.forget(new.req_id)
            self._names = []
            lora, salt = new.lora_request, getattr(messages.attached(output), "salts", {}).get(new.req_id)
            self.writers.identify(new.req_id, lora=lora and f"{lora.lora_name} of {lora.lora_path}", cache_salt=salt)
            # V2 sends all that is computed again after a preemption; V1 the prompt.
            tokens = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            if getattr(new, "prompt_embeds", None) is not None:
                self.embedded.add(new.req_id)
            elif tokens is not None:
                self.prompts.give(new.req_id, upload(tokens, torch.device("cpu")))

    def ids(self, names: Sequence[str]) -> Tensor:
        """Writer ids of ``names``, int32 ``[len(names)]``; on the current stream. Must not be written to. The requests
        of the batch before in the same order, as in decode, cost one comparison of lists."""
        if names != self._names:
            self._names = list(names)
            self._ids = upload([self.writers.id(name) for name in names], self._device, torch.int32)
        return self._ids
