"""`Scheduler` and its requests."""

import contextlib
import copy
import dataclasses
import http
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from canary_sglang.compat import disaggregated, progress

SPECULATION = frozenset({"NONE", "EAGLE", "EAGLE3", "STANDALONE", "NGRAM"})
"""Algorithms that leave the served model's KV of all tokens of a request but the last one, by their names."""

MICROBATCHES = ("mbs", "running_mbs", "last_mbs")
"""Lists of batches of the scheduler of a pipeline's stage."""


def running_requests(scheduler: Any, batch: Any = None) -> list[Any]:
    """Unfinished requests with slots, or about to get some, in the order of their names; of a PD prefill engine also
    those in transfer. ``batch``: one that the scheduler may not name itself."""
    batches = [scheduler.running_batch, scheduler.last_batch, getattr(scheduler, "cur_batch", None), batch]
    batches += [*batches_under_way(scheduler), *microbatches(scheduler)]
    found = {id(request): request for batch in batches if batch is not None for request in batch.reqs}
    if scheduler.chunked_req is not None:
        found[id(scheduler.chunked_req)] = scheduler.chunked_req
    found |= {id(request): request for request in disaggregated.in_transfer(scheduler)}
    return sorted((r for r in found.values() if not r.finished()), key=lambda request: str(request.rid))


def batches_under_way(scheduler: Any) -> list[Any]:
    """The overlap scheduler's batches that were issued, and whose results are not taken yet."""
    return [batch for batch, _ in getattr(scheduler, "result_queue", ())]


def on_gpu(scheduler: Any) -> bool:
    """Whether the engine computes on a GPU."""
    return torch.device(scheduler.server_args.device).type != "cpu"


def await_tokens(scheduler: Any, result: Any) -> None:
    """Waits for the tokens of a batch's ``result``, as the scheduler itself does before it looks at them."""
    done = getattr(result, "copy_done", None)
    if done is not None:
        done.synchronize()
    elif not scheduler.enable_overlap:
        torch.cuda.current_stream().synchronize()


def is_staged(scheduler: Any) -> bool:
    """Whether the scheduler is that of a stage of a pipeline."""
    return (getattr(scheduler.server_args, "pp_size", None) or 1) > 1


def microbatches(scheduler: Any) -> list[Any]:
    """All batches of a stage of a pipeline, some of them twice; none of another scheduler."""
    return [one for name in MICROBATCHES for one in getattr(scheduler, name, ()) if one is not None]


def computed_tokens(scheduler: Any, batch: Any, draft: bool = False) -> int:
    """Number of tokens computed by a `ScheduleBatch` by SGLang's own books, with the served model, or with its
    ``draft`` model; of a tree of drafts the verified ones. To be asked before the batch runs: speculation changes
    it."""
    mode = batch.forward_mode
    if mode.is_idle() or mode.is_prebuilt():
        return 0
    if not mode.is_decode():
        # Of a prefill that is split by layers, the later layers compute the same tokens.
        later = mode.is_split_prefill() and batch.split_index
        return 0 if later else int(batch.extend_num_tokens or 0)
    algorithm = getattr(batch, "spec_algorithm", None)
    if algorithm is None or algorithm.is_none():
        return len(batch.reqs)
    if getattr(scheduler.server_args, "speculative_adaptive", False):
        # How many are drafted is decided later: at least one is computed.
        return len(batch.reqs)

    def option(name: str) -> int:
        # Where none is given, the worker knows what was chosen.
        chosen = getattr(scheduler.draft_worker, name, None)
        return int(chosen or getattr(scheduler.server_args, name, None) or 1)

    # A draft model is given all that was verified, after its own guesses. Those of a tree lie in slots that nobody goes
    # on from, and are not recorded.
    chain = draft and option("speculative_eagle_topk") == 1
    guessed = option("speculative_num_steps") - 1 if chain else 0
    return len(batch.reqs) * (option("speculative_num_draft_tokens") + guessed)


def table_row(scheduler: Any, request: Any) -> tuple[torch.Tensor | None, int]:
    """A request's row of the slot table, and its number of valid entries; None and 0 before there is a row."""
    index = row_number(request)
    if index is None:
        return None, 0
    return scheduler.req_to_token_pool.req_to_token[index], allocated_tokens(request)


def state_slot(scheduler: Any, request: Any) -> int | None:
    """The slot of a request's recurrent state; None before there is one. Reads the device."""
    index = row_number(request)
    return None if index is None else int(scheduler.req_to_token_pool.req_index_to_mamba_index_mapping[index])


def states(scheduler: Any, request: Any) -> torch.Tensor:
    """The slot of a request's recurrent states, int64 ``[1]``, without a look at it."""
    mapping: torch.Tensor = scheduler.req_to_token_pool.req_index_to_mamba_index_mapping
    row = row_number(request)
    return mapping[row : row + 1].to(torch.int64, copy=True)


def computed_length(request: Any) -> int | None:
    """Number of tokens in a request's states, by the batches made so far; None where the release doesn't count them."""
    length = getattr(getattr(request, "kv", None), "kv_committed_len", None)
    return None if length is None else int(length)


def checkpoint_slots(scheduler: Any, request: Any) -> list[int]:
    """Slots of the checkpoints that a request's forwards take of its recurrent state, for the prefix cache; none where
    they take none. Reads the device."""
    taken = getattr(scheduler.req_to_token_pool, "req_index_to_mamba_ping_pong_track_buffer_mapping", None)
    index = row_number(request)
    return [] if taken is None or index is None else [int(slot) for slot in taken[index].tolist()]


def allocated_tokens(request: Any) -> int:
    """Number of a request's tokens with slots."""
    kv = getattr(request, "kv", None)
    return int(getattr(kv if hasattr(kv, "kv_allocated_len") else request, "kv_allocated_len", 0))


def row_number(request: Any) -> Any:
    """A request's row of the slot table, None before there is one."""
    kv = getattr(request, "kv", None)
    return getattr(request if hasattr(request, "req_pool_idx") else kv, "req_pool_idx", None)


def identity(request: Any, adapters: bool = True) -> dict[str, str | None]:
    """Conditions of a request's KV beside its tokens, for `Identities.anchor`: empty for most. Without ``adapters`` the
    LoRA adapter is left out. SGLang joins the adapter's id to the key of the prefix cache."""
    lora, key = getattr(request, "lora_id", None), getattr(request, "extra_key", None)
    salt = getattr(request, "cache_salt", None)
    if not (lora or key or salt):
        return {}
    if lora and key and key.endswith(lora):
        key = key[: -len(lora)]
    parts = {"lora": lora if adapters else None, "extra_key": key, "cache_salt": salt}
    return {name: str(value) for name, value in parts.items() if value}


def traceparent(request: Any) -> str | None:
    """The ``traceparent`` of a request's own span, None where SGLang does not trace the request."""
    context = getattr(getattr(request, "time_stats", None), "trace_ctx", None)
    if getattr(context, "tracing_enable", False) is not True:
        return None
    # Spans that another process exports, or those of this one.
    carrier, own = getattr(context, "_root_span_carrier", None), getattr(context, "root_span_context", None)
    if not isinstance(carrier, dict) and own is not None:
        from opentelemetry import propagate

        carrier = {}
        propagate.inject(carrier, own)
    return carrier.get("traceparent") if isinstance(carrier, dict) else None


def searches_beams(request: Any) -> bool:
    """Whether a beam search decides a request's next token: not the one sampled for its row."""
    width = getattr(getattr(request, "sampling_params", None), "beam_width", None)
    return getattr(request, "beam_group", None) is not None or (width or 1) > 1


def streaming_session(request: Any) -> Any | None:
    """The session with the slots for the rest of the request, beside the prefix cache; None for none."""
    session = getattr(request, "session", None)
    return session if getattr(session, "streaming", False) else None


def embedded(request: Any) -> bool:
    """Whether the request has embeddings in the place of tokens, or of some: the tokens there mean nothing."""
    if getattr(request, "input_embeds", None) is not None:
        return True
    return overrides(request) is not None


def overrides(request: Any) -> Any | None:
    """The request's `PositionalEmbeds`: ``embeds`` in the place of the tokens at ``positions``; None for none."""
    return getattr(request, "positional_embed_overrides", None)


def has_media(request: Any) -> bool:
    """Whether the request has images or other media."""
    return getattr(request, "multimodal_inputs", None) is not None


def media(request: Any) -> Iterator[tuple[int, Sequence[int], str]]:
    """Images and other media of a request: first position, the numbers there in the place of tokens, and a name.
    SGLang makes the numbers of a hash, from 0.5.23 on several that take turns."""
    for item in getattr(getattr(request, "multimodal_inputs", None), "mm_items", None) or ():
        number: Any = getattr(item, "pad_value", None)
        what = str(getattr(getattr(item, "modality", None), "name", "media")).lower()
        for first, last in (getattr(item, "offsets", None) or ()) if number is not None else ():
            count, taking_turns = int(last) - int(first) + 1, getattr(item, "padding_sequence", None)
            yield int(first), taking_turns(count) if taking_turns else [number] * count, f"{what} #{number:x}"


def abort(scheduler: Any, request: Any, message: str) -> bool:
    """Ends a running request after its next forward, as SGLang ends requests that time out: the client gets ``message``
    with status 503, and the KV does not enter the prefix cache. False if the request ends already."""
    if request.finished() or request.to_finish is not None:
        return False
    request.to_finish = corrupted(message)
    # A chunked prefill continues from its own tokens in the cache, so it must put them there until its last chunk.
    if request is not scheduler.chunked_req and len(request.output_ids):
        request.skip_radix_cache_insert = True
    return True


def prefix_hits(batch: Any) -> list[tuple[int, int]]:
    """Of each request with its first prefill in ``batch`` and a prefix from the cache: its row of the slot table, and
    the prefix's number of tokens."""
    if not batch.forward_mode.is_extend() or batch.prefix_lens is None:
        return []
    decoding = set(map(id, batch.decoding_reqs or ()))
    hits = []
    for request, length in zip(batch.reqs, batch.prefix_lens, strict=False):
        row = row_number(request)
        # Later chunks have the slots of earlier ones as their prefix.
        if length and row is not None and request.extend_batch_idx <= 1 and id(request) not in decoding:
            hits.append((int(row), int(length)))
    return hits


def deciding_group(scheduler: Any, withholds: bool = False) -> tuple[Any, str | None]:
    """The CPU process group of the ranks that schedule the same batches together, None for a single rank; and why these
    ranks can't make the same decisions, None if they can. ``withholds``: whether they hold tokens back."""
    args = scheduler.server_args
    if is_staged(scheduler):
        return _group_of_stages(scheduler)
    if disaggregated.side(scheduler) != "null" and not withholds:
        return None, "with PD disaggregation another engine holds or awaits the same KV; nothing is aborted or evicted"
    group = scheduler.tp_cpu_group
    if getattr(args, "enable_dp_attention", False):
        if getattr(args, "attn_cp_size", 1) > 1:
            return None, "data-parallel attention with attn_cp_size > 1; nothing is aborted or evicted there"
        group = scheduler.attn_tp_cpu_group
    lone = not torch.distributed.is_initialized() or torch.distributed.get_world_size(group) == 1
    return (None if lone else group), None


def _group_of_stages(scheduler: Any) -> tuple[Any, str | None]:
    """See `deciding_group`."""
    args = scheduler.server_args
    tiers = [getattr(args, name, False) for name in ("enable_hierarchical_cache", "enable_lmcache")]
    if any(tiers) or getattr(args, "enable_dp_attention", False) or disaggregated.side(scheduler) != "null":
        other = "data-parallel attention, PD disaggregation or a tier of the prefix cache"
        return None, f"the stages of a pipeline, with {other}; nothing is aborted or evicted there"
    if not all(hasattr(scheduler, name) for name in (*MICROBATCHES, "world_group")):
        return None, "this SGLang runs the stages of a pipeline in another way; nothing is aborted or evicted there"
    return scheduler.world_group.cpu_group, None


def corrupted(message: str) -> Any:
    """The end of a request that its client may try again, with status 503."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    return FINISH_ABORT(message, http.HTTPStatus.SERVICE_UNAVAILABLE, "KVCacheCorrupted")


def speculation(scheduler: Any) -> str:
    """The name of the algorithm of speculative decoding, ``NONE`` for none."""
    return str(getattr(getattr(scheduler, "spec_algorithm", None), "name", "NONE"))


def recompute_refusal(scheduler: Any) -> str | None:
    """Why no request of the engine can be computed again by an internal one, None where it can."""
    args = scheduler.server_args
    parts = ("pp_size", "dp_size", "attn_cp_size", "dcp_size")
    if any((getattr(args, name, None) or 1) > 1 for name in parts) or disaggregated.side(scheduler) != "null":
        return "over ranks that are not tensor-parallel ones, or with PD disaggregation, nothing is computed again"
    algorithm = speculation(scheduler)
    if algorithm not in SPECULATION:
        return f"with speculation by {algorithm} nothing is computed again: which KV it leaves is not known"
    if getattr(scheduler.token_to_kv_pool_allocator, "swa_req_ring", False):
        return "models with rings for windows are not computed again"
    if any(getattr(args, name, False) for name in ("enable_lmcache", "enable_unified_cache_external_linker")):
        return "a tier of the prefix cache would keep what is computed, or bring it"
    if getattr(args, "dllm_algorithm", None) is not None or getattr(args, "enable_hisparse", False):
        return "the model's attention is not that of each token to all before"
    if not progress.chunks_stay_private():
        return "this release of SGLang keeps no KV outside of the prefix cache between chunks: 0.5.21 does"
    return None


def again_refusal(request: Any, model: Any | None) -> str | None:
    """Why a request can't be computed again by ``model``, None where it can. Without a model: once it has ended."""
    if getattr(request, "input_embeds", None) is not None:
        return "embeddings stand in the place of tokens"
    if model is None and (has_media(request) or overrides(request) is not None):
        return "media or embeddings in the place of tokens end with a request"
    if has_media(request) and (reason := _media_refusal(request.multimodal_inputs, model)) is not None:
        return reason
    sessions = (getattr(request, name, None) for name in ("session", "session_id"))
    if searches_beams(request) or any(one is not None for one in sessions):
        return "it is a beam search, or in a session that goes on"
    if getattr(request, "token_type_ids", None) is not None:
        return "its tokens are of more than one type"
    return None


def _media_refusal(inputs: Any, model: Any) -> str | None:
    """Why images and other media can't be handed to a second request. Gemma's attend to both sides, unless a chunk cuts
    them."""
    if hasattr(model, "prepare_attn_masks"):
        return "attention to its media depends on the chunks"
    if any(getattr(inputs, name, None) is not None for name in ("num_image_tokens", "vision_position_ids")):
        return "its media are read by an encoder beside the tokens"
    for item in inputs.mm_items:
        if item.feature is None and item.precomputed_embeddings is None:
            return "its media are gone"
        if getattr(item, "has_cuda_ipc_proxy", bool)():
            return "its media are in another process's memory"
    return None


def _same_media(inputs: Any, tokens: int) -> Any:
    """For a second request of so many tokens: SGLang gives up the media of a request that ends."""
    from sglang.srt.managers.mm_utils import extend_mrope_positions_for_retracted_request

    items = [copy.copy(item) for item in inputs.mm_items]
    for item in items:
        item.model_specific_data = dict(item.model_specific_data)
    positions = inputs.mrope_positions
    if positions is not None:
        positions = extend_mrope_positions_for_retracted_request(positions, tokens - positions.shape[1])
    return dataclasses.replace(
        inputs, mm_items=items, mrope_positions=positions, mrope_position_delta_repeated_cache=None
    )


def longest_lesson(scheduler: Any) -> int:
    """See `InternalRequests.longest`: 0 where drafts are decoded beside, or streamed in another way."""
    streams = hasattr(getattr(scheduler, "output_streamer", None), "stream_output")
    return int(scheduler.max_req_len) - 1 if streams and speculation(scheduler) == "NONE" else 0


def internal_request(scheduler: Any, name: str, target: Any, tokens: int, new_tokens: int) -> Any:
    """A request ``name`` of the first ``tokens`` tokens of ``target``, with its adapter and media: greedy, of so many
    ``new_tokens``, last in line, neither read from the prefix cache nor kept there, and with nothing to stream at its
    end."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    sampling.normalize(None)
    ids = (target.origin_input_ids + target.output_ids)[:tokens]
    request = Req(
        name, "", ids, sampling, lora_id=target.lora_id, extra_key=name, vocab_size=scheduler.model_config.vocab_size
    )
    request.tokenizer, request.logprob_start_len = scheduler.tokenizer, -1
    if has_media(target):
        request.multimodal_inputs = _same_media(target.multimodal_inputs, tokens)
    if overrides(target) is not None:
        request.positional_embed_overrides = overrides(target)
    request.skip_radix_cache_insert = request.finished_output = True
    if getattr(scheduler, "enable_priority_scheduling", False):
        lowest = 1 << 62
        request.priority = lowest if scheduler.schedule_low_priority_values_first else -lowest
    request.time_stats.set_wait_queue_entry_time()
    return request


def drop_chunked(scheduler: Any, request: Any) -> None:
    """Ends an internal request between two of its chunks, as SGLang ends an aborted one, but tells nobody."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    request.finished_reason = FINISH_ABORT("gives way")
    released(scheduler, request)
    progress.release(request, scheduler.tree_cache)
    scheduler.chunked_req = None


def drop_decoding(scheduler: Any, request: Any) -> None:
    """Ends a decoding internal request, as SGLang retracts a request, but for good. With the overlap scheduler a result
    not taken yet is left alone."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    if request.finished() or row_number(request) is None:
        return
    request.finished_reason = FINISH_ABORT("gives way")
    for batch in (scheduler.running_batch, scheduler.last_batch):
        if batch is not None and any(one is request for one in batch.reqs):
            progress.leave(batch, request)
    progress.release(request, scheduler.tree_cache)
    scheduler.running_batch.batch_is_full = False


def released(scheduler: Any, request: Any) -> None:
    """The prefix cache forgets a request that ends before its first forward, or between chunks."""
    release = getattr(scheduler, "_release_aborted_request", None)
    if release is not None:
        release(request)


def is_idle(scheduler: Any) -> bool:
    """Whether the scheduler serves nobody, and has no result of a forward to process."""
    loops = not scheduler.enable_overlap or hasattr(scheduler, "result_queue")
    return loops and bool(scheduler.is_fully_idle())


def is_done_with(scheduler: Any, request: Any) -> bool:
    """Whether no batch and no result of a scheduler has an ended internal ``request`` any more."""
    last = scheduler.last_batch
    if any(one is request for batch, *_ in getattr(scheduler, "result_queue", ()) for one in batch.reqs):
        return False
    if last is not None and last.reqs and all(one is request for one in last.reqs):
        # As the scheduler does itself when it makes its next batch.
        progress.leave(last, request)
    return True


def forward_stream(scheduler: Any) -> contextlib.AbstractContextManager[Any]:
    """A context of the stream of the forwards: one of its own with the overlap scheduler."""
    stream = getattr(scheduler, "forward_stream_ctx", None) if scheduler.enable_overlap else None
    return contextlib.nullcontext() if stream is None else stream
