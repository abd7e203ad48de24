"""`RankGroup`: tensor-parallel ranks that compute the same batches, as seen by one of them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankGroup:
    """``name``: of the group, the same in all its ranks; among children of one process no other group has it. ``rank``:
    this process's, from 0, of ``size``. ``kv``: ranks with the same text hold the same KV; None: no other rank holds
    this one's. ``slots``: whether one allocator hands out slots to all ranks; False for an allocator in each rank."""

    name: str
    rank: int
    size: int
    kv: str | None = None
    slots: bool = True

    @classmethod
    def of(cls, name: str, rank: int, size: int, heads: int, slots: bool = True) -> "RankGroup":
        """A group of one of several pipeline stages. ``rank``: among all processes of the replica, where those of a
        stage are neighbours. ``size``: tensor-parallel ranks. ``heads``: KV heads of the whole model, 1 for latents;
        fewer than ranks are held by several of these, neighbours again. 0: unknown, so no KV counts as alike."""
        stage, own = divmod(rank, size)
        alike = str(own * heads // size) if 0 < heads < size else None
        return cls(f"{name}, stage {stage}", own, size, alike, slots)
