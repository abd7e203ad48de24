"""How far a request is computed, and the end of its slots: by tensors of slots to 0.5.21, by numbers from 0.5.22 on."""

from typing import Any

import torch


def prefix_length(request: Any) -> int:
    """Number of a request's tokens before those of its next forward, in the cache or computed by earlier chunks."""
    slots = getattr(request, "prefix_indices", None)
    return int(request.prefix_len) if slots is None else len(slots)


def chunk_end(request: Any) -> int:
    """Number of a request's tokens up to the end of its last prefill, or of a chunk of it."""
    chunk = getattr(request, "extend_range", None)
    return int(request.extend_end if chunk is None else chunk.end)


def chunks_stay_private() -> bool:
    """Whether a request may go on from a chunk that does not enter the prefix cache."""
    from sglang.srt.managers.schedule_batch import Req

    # `refresh_fill_ids` is that of releases which count.
    return any(hasattr(Req, name) for name in ("_refresh_fill_ids", "refresh_fill_ids"))


def go_on_from_chunk(request: Any, row: torch.Tensor) -> None:
    """The next chunk of a request that does not enter the prefix cache begins behind the last one. ``row``: its row of
    the slot table. Releases that count see to it themselves."""
    if hasattr(request, "prefix_indices"):
        request.prefix_indices = row[: chunk_end(request)].to(torch.int64, copy=True)


def release(request: Any, cache: Any) -> None:
    """Gives a request's slots back; none of its KV enters the prefix ``cache``."""
    from sglang.srt.mem_cache import common

    counts = hasattr(common, "checkpoint_kv_cache")
    common.release_kv_cache(request, cache, **{"checkpoint" if counts else "is_insert": False})


def leave(batch: Any, request: Any) -> None:
    """Takes ``request``, and all that have ended, from ``batch``."""
    batch.filter_batch(keep_indices=[i for i, one in enumerate(batch.reqs) if not (one is request or one.finished())])
