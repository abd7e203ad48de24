"""Whether tensor-parallel ranks of one engine compute the same batches, sample the same tokens and hold the same KV."""

from canary_core.watchers.ranks.group import RankGroup
from canary_core.watchers.ranks.watch import RankWatch

__all__ = ["RankGroup", "RankWatch"]
