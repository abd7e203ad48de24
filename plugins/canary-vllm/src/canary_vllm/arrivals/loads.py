"""`Loads`: informs the ledger of a connector's stores and loads."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from canary_adapters import BlockLoad, BlockLoads, BlockMessage, CompleteBlocks, upload
from canary_core import Canary, Origin, Patches
from canary_vllm.allocator import messages
from canary_vllm.batches.requests import Requests
from canary_vllm.compat import connectors
from canary_vllm.pools.pool import Group


class Loads:
    """For one runner whose engine has a connector, of any kind.

    The scheduler names the blocks a connector will fill, and the tokens (`BlockMessage.loads`). Blocks found bad by
    ``brought`` join those whose load failed by the connector's own word, so that vLLM's ``kv_load_failure_policy``
    applies; of several ranks vLLM joins the sets. ``groups``: all guarded ones; what comes for states is unknown. For
    drafts it is judged by what lay there before alone, since nobody knows when it is stored. Complete blocks of each
    forward count as stored: any store of a connector, at any time, is among them.
    """

    def __init__(
        self, canary: Canary, groups: Sequence[Group], requests: Requests, origin: Origin, drafted: int
    ) -> None:
        self._canary = canary
        self._groups = [group for group in groups if group.holds in ("tokens", "drafts")]
        self._others = [group for group in groups if group.holds == "states"]
        self.brought = BlockLoads(canary, self._groups, origin, requests.writers)
        # With asynchronous scheduling the host learns a step late which of them were accepted.
        tokens = [group for group in groups if group.holds == "tokens"]
        self._complete = CompleteBlocks(canary, tokens, requests.blocks, 2 * drafted + 1 if drafted else 0)
        self._patches = Patches(canary.guard)

    def scheduled(self, output: Any, message: BlockMessage | None) -> None:
        """Before the forward of ``output``, after the events of ``message`` were told."""
        connector = None if self._patches.done else connectors.instance()
        if connector is not None:
            self._patches.wrap(connector, "get_block_ids_with_load_errors", self._loads)
            if self.brought.gated:
                self._patches.wrap(connector, connectors.ends(connector), self._ends)
        before = computed_before(output)
        self._complete.begin(output.finished_req_ids, messages.begun(output), before)
        loads = message.loads if message is not None else []
        for load in loads:
            self._forget(load)
        self.brought.begin(output.finished_req_ids, before, loads)

    def computed(self, output: Any) -> None:
        """After the forward of ``output``: complete blocks may be stored from now on."""
        with self._canary.guard("stored"):
            new, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
            before = ((name, computed) for name, computed in computed_before(output) if name in new)
            self._complete.end((name, computed + new[name] - len(drafts.get(name, ()))) for name, computed in before)

    def close(self) -> None:
        """Restores the connector's functions, unless a request waits for `BlockLoads.finished`."""
        if not self.brought.holding:
            self._patches.undo()

    def _loads(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def loaded(*args: Any, **kwargs: Any) -> Any:
            failed = original(*args, **kwargs)
            # What vLLM makes are inference tensors, which can be written to only in this mode.
            with self._canary.guard("loaded"), torch.inference_mode():
                failed = self.brought.loaded(failed)
            return failed

        return loaded

    def _ends(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def ended(*args: Any, **kwargs: Any) -> Any:
            results = original(*args, **kwargs)
            with self._canary.guard("ended"):
                results = connectors.ended(results, self.brought.finished)
            return results

        return ended

    def _forget(self, load: BlockLoad) -> None:
        for group in self._others if load.known else [*self._groups, *self._others]:
            if group.holds == "states":
                slots = upload([block for block in load.blocks[group.number] if block], self._canary.device)
            else:
                slots, _ = load.slots(group, self._canary.device)
            self._canary.slots.forget(group.region, slots)


def computed_before(output: Any) -> Sequence[tuple[str, int]]:
    """The requests in the forward of ``output``, and each one's number of tokens before."""
    cached = output.scheduled_cached_reqs
    new = [(r.req_id, int(r.num_computed_tokens)) for r in output.scheduled_new_reqs]
    return [*new, *zip(cached.req_ids, map(int, cached.num_computed_tokens), strict=True)]
