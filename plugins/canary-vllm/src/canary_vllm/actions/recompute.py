"""vLLM's requests, computed again by internal ones: in the scheduler's process."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from canary_adapters import RecomputePairs, SchedulerRequests


def follow(scheduler: Any, share: float) -> SchedulerRequests:
    """Makes requests of ``scheduler`` computable again."""
    from vllm.v1.request import RequestStatus

    abort = partial(scheduler.finish_requests, finished_status=RequestStatus.FINISHED_ABORTED)
    return SchedulerRequests(scheduler, _again, partial(_why_not, scheduler), abort, share)


def idle(core: Any, requests: SchedulerRequests, workers: Sequence[RecomputePairs]) -> None:
    """``core`` serves nobody, and is about to wait for its input."""
    from vllm.v1.engine import EngineCoreRequestType

    requests.idle(workers, partial(core.input_queue.put_nowait, (EngineCoreRequestType.WAKEUP, None)))


def _again(name: str, target: Any, tokens: int) -> Any:
    """Greedy, of one token and the same adapter. Salted, though its blocks never get a hash."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(
        max_tokens=1, temperature=0, ignore_eos=True, detokenize=False, skip_reading_prefix_cache=True
    )
    return Request(
        name, list(target.all_token_ids[:tokens]), params, None, client_index=target.client_index,
        lora_request=target.lora_request, cache_salt=name, priority=1 << 30,
    )  # fmt: skip


def _why_not(scheduler: Any, request: Any) -> str | None:
    if scheduler.connector is not None:
        return "a connector would keep what is computed, or bring it"
    if getattr(request, "prompt_embeds", None) is not None or request.mm_features:
        return "embeddings or media stand in the place of tokens"
    if request.sampling_params is None or getattr(request, "resumable", False):
        return "it is a pooling request, or a session that goes on"
    return None
