"""vLLM's requests, computed again by internal ones: in the scheduler's process."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from canary_adapters import IdleWorkers, RecomputePair, SchedulerRequests, refusals, same_inputs
from canary_core import CanaryConfig, may_recompute
from canary_vllm.compat import connectors
from canary_vllm.session import Session


def follow(scheduler: Any, config: CanaryConfig, sessions: Callable[[], Sequence[Session]]) -> SchedulerRequests:
    """Makes requests of ``scheduler`` computable again. ``sessions``: of the scheduler's process."""
    from vllm.v1.request import RequestStatus

    abort = partial(scheduler.finish_requests, finished_status=RequestStatus.FINISHED_ABORTED)
    unfit = refusals(scheduler, connectors.origin(scheduler, config.ledger_private))
    requests = SchedulerRequests(scheduler, _again, unfit, abort, config.recompute)
    requests.here = lambda: [session.recomputed for session in sessions()]
    requests.polls = config.control == "write"
    if may_recompute(config):
        requests.remember()
    return requests


def idle(core: Any, requests: SchedulerRequests) -> None:
    """``core`` serves nobody, and is about to wait."""
    from vllm.v1.engine import EngineCoreRequestType

    workers = IdleWorkers(requests.here(), lambda pairs: core.model_executor.collective_rpc(exchange(pairs)))
    requests.idle(workers, partial(core.input_queue.put_nowait, (EngineCoreRequestType.WAKEUP, None)))


def exchange(pairs: Sequence[RecomputePair]) -> Callable[[Any], Sequence[str]]:
    """A function for each worker, as `workers.question`: takes ``pairs``, and returns wanted requests."""

    def take(worker: Any) -> Sequence[str]:
        try:
            from canary_vllm.hooks import HOOKS

            (session,) = [session for session in HOOKS.sessions if session.runner is worker.model_runner]
            session.recomputed.compare(pairs)
            return session.recomputed.wanted()
        except Exception:
            return ()

    return take


def _again(name: str, target: Any, tokens: int, new_tokens: int) -> Any:
    """Greedy, of so many new tokens, the same embeddings, media and adapter. Salted, though its blocks never get a
    hash."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(
        max_tokens=new_tokens, temperature=0, ignore_eos=True, detokenize=False, skip_reading_prefix_cache=True
    )
    return Request(
        name, list(target.all_token_ids[:tokens]), params, None, client_index=target.client_index,
        lora_request=target.lora_request, cache_salt=name, priority=1 << 30, **same_inputs(name, target, tokens),
    )  # fmt: skip
