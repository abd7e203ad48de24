"""`BlockPrefix`: a parked prefix in blocks like vLLM's, each with a key for all tokens up to the block's end."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import wraps
from itertools import chain, islice, takewhile
from operator import attrgetter
from typing import Any, Literal

from canary_adapters.parked_prefixes import PROOF_SHARE, GroupBlocks, ParkedPrefix, ParkedPrefixes
from canary_core import Patches

_NUMBER = attrgetter("block_id")

KeyedBlock = tuple[Any, Any]
"""A block of the engine's, and its key in the prefix cache when the request ended."""


@dataclass(slots=True, eq=False, kw_only=True)
class BlockPrefix(ParkedPrefix):
    """Takes the place of the engine's own request in the making of an internal one. lora_request: the request's adapter
    as the engine knows it, None for none."""

    groups: Sequence["_Group"] = field(default=(), repr=False)
    lora_request: Any = None

    client_index = 0

    @property
    def all_token_ids(self) -> Sequence[int]:
        """See `content`."""
        return self.content

    def take(self, tokens: Sequence[int], held: Iterable[tuple[int, Sequence[Any]]]) -> None:
        """The request ends with ``tokens`` in the cache. ``held``: of each group the tokens of a block, and the
        request's blocks."""
        self.groups = [
            _Group(size, [(block, block.block_hash) for block in blocks[: len(tokens) // size]])
            for size, blocks in held
        ]
        self.content = array("i", tokens[: self.left()])

    def left(self) -> int:
        """See `ParkedPrefix`."""
        return min((group.left() for group in self.groups if group.whole), default=0)

    def blocks(self) -> GroupBlocks:
        """See `ParkedPrefix`."""
        return [[one[0].block_id if _keeps(one) else 0 for one in group.blocks] for group in self.groups]


@dataclass(frozen=True, slots=True)
class _Group:
    """size: tokens of a block."""

    size: int
    blocks: Sequence[KeyedBlock]

    @property
    def whole(self) -> bool:
        """Whether the group keeps the KV of all positions: no window has passed the first."""
        return bool(self.blocks) and not self.blocks[0][0].is_null

    def left(self) -> int:
        """Number of tokens from the first on."""
        return self.size * sum(1 for _ in takewhile(_keeps, self.blocks))


def follow_releases(
    patches: Patches,
    pool: Any,
    guard: Callable[[str], AbstractContextManager[object]],
    note: Callable[[Literal["park", "free"], list[Any]], None],
) -> None:
    """After each call that frees blocks of vLLM's ``pool``: calls ``note`` with the blocks left without a holder;
    ``park`` for blocks kept by the prefix cache. ``guard``: see `Patches`."""
    caching = bool(pool.enable_caching)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def release(blocks: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
            every = list(blocks)  # It may be an iterator.
            result = original(every, *args, **kwargs)
            with guard("after free_blocks"):
                gone = _unheld(every, pool)
                note("park", parked := [b for b in gone if caching and b.block_hash is not None])
                if len(parked) < len(gone):
                    note("free", [b for b in gone if not caching or b.block_hash is None])
            return result

        return release

    for name in ("free_blocks", "unpin_blocks"):
        if hasattr(pool, name):
            patches.wrap(pool, name, make)


def _unheld(freed: Sequence[Any], pool: Any) -> list[Any]:
    """The blocks just ``freed`` and without a holder, each as often as freed beyond the number of holders."""
    gone = [b for b in freed if b.ref_cnt <= 0 and getattr(b, "pool", None) in (None, pool)]
    if len(set(map(_NUMBER, gone))) == len(gone) and all(b.ref_cnt == 0 for b in gone):
        return gone
    times = Counter(map(_NUMBER, freed))
    return [b for b in {b.block_id: b for b in gone}.values() for _ in range(min(times[b.block_id], 1 - b.ref_cnt))]


def free_blocks(pool: Any) -> Iterator[Any]:
    """The free list of vLLM's ``pool``, perhaps a broken one, first to last: no more entries than possible."""
    queue = pool.free_block_queue
    block, left = queue.fake_free_list_head.next_free_block, len(pool.blocks) + 1
    while block is not None and block is not queue.fake_free_list_tail and left:
        yield block
        block, left = block.next_free_block, left - 1


def room_for_proof(pool: Any, held: GroupBlocks, known: ParkedPrefixes) -> bool:
    """`InternalRequests.spare` of a prefix in the blocks ``held``, in vLLM's ``pool``. Free blocks are taken from the
    front, where vLLM puts back those without a key; by a release that doesn't nothing is evicted."""
    needed = sum(len(blocks) + 1 for blocks in held)
    front = list(islice(free_blocks(pool), needed))
    keyed = {block.block_id for block in front if block.block_hash is not None}
    if len(front) < needed:
        return False
    if keyed:
        much = needed > int(PROOF_SHARE * len(pool.blocks)) or not hasattr(pool.free_block_queue, "prepend_n")
        if much or not keyed.isdisjoint(chain.from_iterable(held)):
            return False
        pool.evict_blocks(keyed)
        known.evicted(len(keyed))
    return True


def _keeps(block: KeyedBlock) -> bool:
    held, key = block
    return key is not None and held.block_hash == key
