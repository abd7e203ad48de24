"""`Protection`: acts on verdicts in the scheduler's process, before an output is given out."""

import inspect
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from canary_adapters import BlockVerdict, HashChain, Tries, UnderWay, VerdictWay
from canary_core import CanaryConfig, Event, Patches, Verdict, Writers, hookimpl
from canary_vllm.allocator import messages
from canary_vllm.session import Session


class Protection:
    """Receives verdicts of this process's workers, or of other processes by a `VerdictWay`, and acts before the
    scheduler takes the output of the verdicts' own step: no token of that step is given out for a request with such KV
    (`Tries`; what ends has vLLM's finish reason ``error``). ``sessions``: of the runners at work, a verdict's own.
    ``tell``: names the engine in an event, and hands the event to all plugins.

    Requests with blocks that a connector failed to load are left to vLLM's own ``kv_load_failure_policy``, where that
    is right. With protect nothing is loaded for a request that is computed again: the same would come.
    """

    def __init__(
        self, config: CanaryConfig, sessions: Callable[[], Iterable[Session]], tell: Callable[[Event], None]
    ) -> None:
        self._mode = config.on_violation
        self._sessions = sessions
        self._tell = tell
        self._schedulers: dict[int, tuple[HashChain, UnderWay]] = {}
        self._patches = Patches()
        self._tries = Tries[str](self._mode, {})
        self._ended: list[Any] = []
        self.way = VerdictWay()

    @hookimpl
    def canary_verdict(self, verdict: Verdict) -> None:
        """In a worker: sends the verdict to the scheduler's process, or keeps the verdict for a scheduler here."""
        for session in self._sessions():
            found = BlockVerdict.of(verdict, session.groups)
            # An output names what is gated.
            if found is None or session.gates(found) or self.way.put(found, session.runner.vllm_config):
                continue
            reason = f"the scheduler's process can't be told; nothing is done about a finding ({found.kind})"
            self._tell(Event("quarantine_failed", "warning", {"reason": reason}))

    def joined(self, scheduler: Any) -> None:
        """A scheduler runs in the process."""
        self._schedulers[id(scheduler)] = chain, _ = HashChain(), UnderWay()
        self.way.joined(scheduler.vllm_config)
        if self._mode == "protect":
            self._patches.follow(scheduler.kv_cache_manager.block_pool, "cache_full_blocks", partial(_cached, chain))
            if getattr(scheduler, "connector", None) is not None:
                self._patches.wrap(scheduler.connector, "get_num_new_matched_tokens", self._matches)

    def left(self, scheduler: Any) -> None:
        """A scheduler has ended."""
        self._schedulers.pop(id(scheduler), None)
        self.way.left(scheduler.vllm_config)

    def close(self) -> None:
        """Ends all actions."""
        self._patches.undo()
        self._schedulers.clear()
        self.way.close()

    def scheduled(self, scheduler: Any, output: Any) -> None:
        """``scheduler`` has made the batch ``output``."""
        self._schedulers[id(scheduler)][1].made(messages.begun(output))

    def act(self, scheduler: Any, made: Any = None) -> None:
        """Before ``scheduler`` takes the output ``made``, or makes its next batch."""
        found = self.way.take(scheduler.vllm_config)
        brought = getattr(made, "kv_connector_output", None)
        failed = set(getattr(brought, "invalid_block_ids", None) or ())
        if found or (failed and self._mode == "protect"):
            self._act(scheduler, found, failed, made)

    def ended(self, scheduler: Any, outputs: dict[int, Any]) -> None:
        """Adds the ends of requests to the ``outputs`` that ``scheduler`` gives out, by client, after `act`."""
        if id(scheduler) in self._schedulers:
            self._schedulers[id(scheduler)][1].taken()
        if not self._ended:
            return
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

        ended, self._ended = self._ended, []
        for request in ended:
            client = outputs.setdefault(request.client_index, EngineCoreOutputs())
            last = EngineCoreOutput(request.request_id, [], finish_reason=request.get_finished_reason())
            client.outputs = [*(client.outputs or ()), last]

    def _matches(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def matched(request: Any, *args: Any, **kwargs: Any) -> Any:
            found = original(request, *args, **kwargs)
            return (0, False) if request.request_id in self._tries else found

        return matched

    def _act(self, scheduler: Any, found: Sequence[BlockVerdict], failed: set[int], made: Any) -> None:
        fails = not getattr(scheduler, "recompute_kv_load_failures", True)
        again = failed if self._mode == "protect" and not fails else set()
        found = [*found, *(BlockVerdict("not_loaded", block=block, stands=True) for block in sorted(again))]
        left = failed if fails else again if recomputes(scheduler) else set()
        blocks, (_, under_way) = scheduler.kv_cache_manager.block_pool.blocks, self._schedulers[id(scheduler)]
        # The last bytes of a hash are its group's.
        hashes = {v.block: (blocks[v.block].block_hash or b"")[:-4] for v in found if v.of_all}
        concerned = []
        for request in scheduler.running:
            held = _held(scheduler, request)
            name = Writers.told(request.request_id)
            # It may have hit what was computed from a block that is outside of its window.
            hit = set(request.block_hashes) if self._mode == "protect" and request.request_id in under_way else ()
            after = {block for block, hash in hashes.items() if block not in held and hash in hit}
            own = [v for v in found if v.everything or name == v.request or (v.of_all and v.block in held | after)]
            own = [v for v in own if not self._tries.taken_back(request.request_id, v.step)]
            if own and (left.isdisjoint(held) or not (fails or left.issuperset(v.block for v in own))):
                # Tokens that it had before it hit that stand.
                stands = all(v.stands or v.block in after for v in own) or not request.num_output_tokens
                concerned.append((request, own, stands))
            elif own and not fails:
                self._left(request, own[0])
                # Whoever has it, too, must not read it before it is computed again.
                left = left - held
        for request in scheduler.requests.values() if again else ():
            if request not in scheduler.running and not again.isdisjoint(_held(scheduler, request)):
                # It waits for its load, of which nothing is in the prefix cache yet.
                self._left(request, found[-1])
        if self._mode != "abort":
            self._evict(scheduler, found)
        ending = []
        for request, own, stands in reversed(concerned):
            if self._tries.again(request.request_id, stands, max(v.step for v in own) + under_way.ahead):
                preempt(scheduler, request, made)
                self._told("recomputed", request, own[0])
            else:
                ending.append(request)
                self._told("aborted", request, own[0])
        if ending:
            from vllm.v1.request import RequestStatus

            scheduler.finish_requests([r.request_id for r in ending], RequestStatus.FINISHED_ERROR)
            self._ended += ending
        self._tries.keep(scheduler.requests)

    def _left(self, request: Any, verdict: BlockVerdict) -> None:
        """vLLM itself computes again what ``request`` has from the block of ``verdict`` on."""
        self._tries.began(request.request_id)
        self._told("recomputed", request, verdict)

    def _told(self, name: str, request: Any, verdict: BlockVerdict) -> None:
        about = {"request": Writers.told(request.request_id), **verdict.about}
        self._tell(Event(name, "error" if name == "aborted" else "warning", about))

    def _evict(self, scheduler: Any, found: Sequence[BlockVerdict]) -> None:
        pool, (chain, _) = scheduler.kv_cache_manager.block_pool, self._schedulers[id(scheduler)]
        blocks = {v.block for v in found if v.block >= 0}
        cached = {b.block_id: b.block_hash for b in pool.blocks if b.block_hash is not None and not b.is_null}
        evicted = blocks & cached.keys()
        if self._mode == "protect":
            # Each layer computes from the others, in whatever group.
            groups = {hash[-4:] for hash in cached.values()}
            everything = len(groups) > 1 or any(v.everything for v in found)
            evicted = set(cached) if everything else chain.after(evicted, cached)
        if evicted:
            pool.evict_blocks(evicted)
            about = found[0].about | {"blocks": len(blocks), "evicted": len(evicted)}
            self._tell(Event("quarantined", "warning", about))


def _cached(
    chain: HashChain, _: Any, request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, *a: Any, **k: Any
) -> None:
    """After `cache_full_blocks`: the blocks of ``request`` that are in the prefix cache now."""
    # Of what was cached before, the chain asks for the last one.
    blocks = blocks[max(num_cached_blocks - 1, 0) : num_full_blocks]
    chain.note([block.block_hash for block in blocks], min(num_cached_blocks, 1))


def _held(scheduler: Any, request: Any) -> set[int]:
    ids = scheduler.kv_cache_manager.get_block_ids(request.request_id)
    return {block for blocks in ids for block in blocks}


def recomputes(scheduler: Any) -> bool:
    """Whether vLLM's own way to compute a running request's blocks again is right: not with its V2 runner (its issue
    49250), nor with asynchronous scheduling (45138), where tokens in flight join the answer."""
    config = scheduler.vllm_config
    return not (config.scheduler_config.async_scheduling or getattr(config, "use_v2_model_runner", False))


def preempt(scheduler: Any, request: Any, made: Any = None) -> None:
    """Takes a running request's blocks: the request is computed again, as after vLLM's `reset_prefix_cache`. Output in
    flight is dropped on arrival, also that in ``made``."""
    scheduler.running.remove(request)
    if "drop_stale_output" in inspect.signature(scheduler._preempt_request).parameters:
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
    else:
        scheduler._preempt_request(request, time.monotonic())
        index = getattr(made, "req_id_to_index", {}).get(request.request_id)
        if not request.num_output_placeholders and index is not None and made.sampled_token_ids:
            made.sampled_token_ids[index] = []
        # Those of an earlier time may still be on their way.
        request.async_tokens_to_discard = (
            getattr(request, "async_tokens_to_discard", 0) + request.num_output_placeholders
        )
        request.num_output_placeholders = 0
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
