"""Place of a process among those of one model."""

from dataclasses import dataclass
from typing import Any

import torch

from canary_core import RankGroup


@dataclass(frozen=True, slots=True)
class ReplicaRank:
    """``replica``: index of the data-parallel replica (``--dp-size``, with or without data-parallel attention).
    ``rank``: among the processes of the replica: tensor-parallel ranks of the first pipeline stage first."""

    replica: int = 0
    rank: int = 0


def place(runner: Any) -> ReplicaRank:
    """The place of a `ModelRunner`'s process. With data-parallel attention the replicas are parts of one group of
    processes, and each pipeline stage has some of every replica; else each replica is a group of its own."""
    return places(runner)[world_rank()]


def places(runner: Any) -> list[ReplicaRank]:
    """The places of all processes of the group, by world rank."""
    size = _world_size()
    replicas = int(_parallel("attn_dp_size") or 1)
    if replicas == 1:
        return [ReplicaRank(_replica(runner), rank) for rank in range(size)]
    stage = int(_parallel("tp_size") or size)
    share = stage // replicas
    return [ReplicaRank(rank % stage // share, rank // stage * share + rank % share) for rank in range(size)]


def group(runner: Any) -> RankGroup:
    """The tensor-parallel ranks that compute the same batches as the process of a `ModelRunner`: those of its replica
    and pipeline stage. Each has an allocator of its own."""
    own, model = place(runner), runner.model_config
    size = int(_parallel("tp_size") or _world_size()) // int(_parallel("attn_dp_size") or 1)
    latents = getattr(getattr(model, "attention_arch", None), "name", "") == "MLA"
    heads = 1 if latents else int(model.get_total_num_kv_heads())
    name = f"sglang {getattr(runner, 'dist_port', '')}, replica {own.replica}"
    return RankGroup.of(name, own.rank, size, heads, slots=False)


def world_rank() -> int:
    """Rank of the process in torch.distributed's first group."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _world_size() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _replica(runner: Any) -> int:
    """The process's index by SGLang's data-parallel controller; 0 without one."""
    for holder in (runner, getattr(runner, "ps", None)):
        index = getattr(holder, "dp_rank", None)
        if index is not None:
            return int(index)
    return int(_parallel("dp_rank") or 0)


def _parallel(name: str) -> Any:
    """A fact known to SGLang about its groups; None if unknown to the installed release, or not known yet."""
    try:
        from sglang.srt.runtime_context import get_parallel

        return getattr(get_parallel(), name)
    except Exception:
        # Groups that are not there yet are told in different ways: by assertions, `RuntimeError`, `ValueError`.
        return None
