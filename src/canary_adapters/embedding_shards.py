"""`EmbeddingShards`: ranks with a part of an embedding each inform each other of equal rows."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from canary_core.ops.hashing import keys

SLICE_BYTES = 4 << 20
"""So much is hashed at a time: the device may be nearly full."""


@dataclass(frozen=True, slots=True)
class EmbeddingPart:
    """A rank's rows of an embedding: ``weight`` ``[tokens, ...]``, from the token ``first`` on.

    ``group``: the ranks with a part each; empty where this one has all, or where the holders of the rest are unknown.
    ``place``: this rank's in the group.
    """

    weight: Tensor
    first: int = 0
    group: Sequence[int] = ()
    place: int = 0

    @classmethod
    def of(cls, layer: Any, group_of: Callable[[Any], Any]) -> "EmbeddingPart | None":
        """This rank's part of a layer like vLLM's and SGLang's: a ``weight``, and for a split one the tokens in
        ``shard_indices`` and the number of parts in ``tp_size``. None where the weight is no tensor.

        ``group_of(layer)``: the group of ranks with the parts, with its ``ranks``, ``rank_in_group`` and
        ``world_size``. If the call raises, or the size differs, the holders of the rest are unknown.
        """
        weight, shard = (getattr(layer, name, None) for name in ("weight", "shard_indices"))
        if not isinstance(weight, Tensor):
            return None
        if shard is None:
            return cls(weight)
        first, size = shard.org_vocab_start_index, getattr(layer, "tp_size", 1)
        own = weight[: shard.org_vocab_end_index - first]
        try:
            group = group_of(layer) if size > 1 else None
        except Exception:
            # An engine that ends gives its groups up.
            group = None
        if group is None or group.world_size != size:
            return cls(own, first)
        return cls(own, first, group.ranks, group.rank_in_group)

    def row(self, token: int) -> Tensor | None:
        """The row of ``token``, None if it is not here."""
        place = token - self.first
        return self.weight[place].detach() if 0 <= place < self.weight.shape[0] else None


def embedding_layer(model: Any) -> Any:
    """The layer of an engine's ``model`` with the embedding of tokens; None if named otherwise in the model."""
    get = getattr(model, "get_input_embeddings", None)
    layer = getattr(getattr(model, "model", model), "embed_tokens", None)
    if layer is None and get is not None:
        try:
            return get()
        except Exception:
            # It may want tokens to embed, and give them instead of the layer.
            return None
    return layer


class EmbeddingShards:
    """This rank's rows of an embedding, and hashes of all rows, its own and other ranks'.

    Each rank publishes its hashes before its first forward, under a key of its own in the store from ``store()``, by
    default that of torch.distributed's first group; if None, nothing is known of other ranks. No rank waits for another
    one: unpublished rows are unknown. ``part()``: this rank's present part, None for a model without an embedding here.
    ``forwards()``: number of forwards begun; the ranks of a group run the same ones. ``name``: of the model, where a
    process has several.

    Weights may be replaced while the engine runs, on all ranks between the same two forwards. So a rank asked for its
    rows hashes them anew, and publishes them again with the number of forwards so far. Hashes of another rank count if
    this rank's own rows have not changed since.
    """

    def __init__(
        self,
        part: Callable[[], EmbeddingPart | None],
        forwards: Callable[[], int],
        name: str = "",
        store: Callable[[], Any] | None = None,
    ) -> None:
        self._part = part
        self._forwards = forwards
        self._name = name
        self._store = (store or default_store)()
        self._own: Tensor | None = None
        self._told_at = -1
        self._same_since = 0

    def row(self, token: int) -> Tensor | None:
        """The row of ``token``, None where it is not on this rank."""
        part = self._part()
        return None if part is None else part.row(token)

    def elsewhere(self, token: int) -> bool:
        """Whether this rank has an embedding, without the row of ``token``."""
        part = self._part()
        return part is not None and part.row(token) is None

    def begin(self) -> None:
        """Before a forward: at the first one, publishes this rank's hashes, and waits for the device. Raises
        nothing."""
        if self._told_at < 0:
            self._told_at = 0
            self.hashes(())

    def hashes(self, tokens: Iterable[int]) -> list[int] | None:
        """A hash of the bits of each token's row, 0 where it is all zero; None if one is unknown. Waits for the device,
        but for no other rank. Raises nothing."""
        try:
            part = self._part()
            if part is None or self._store is None or len(part.group) < 2:
                return None
            self._tell(part)
            found = [self._hash(part, token) for token in tokens]
        except Exception:
            # A store that is gone, a device without memory, a dtype without comparisons: then it is not known.
            return None
        known = [value for value in found if value is not None]
        return known if len(known) == len(found) else None

    def _tell(self, part: EmbeddingPart) -> None:
        """Publishes this rank's hashes as of this forward."""
        now = self._forwards()
        if self._own is not None and self._told_at == now:
            return
        own = row_hashes(part.weight)
        if self._own is None or not torch.equal(own, self._own):
            self._own, self._same_since = own, now
        self._told_at = now
        told = torch.cat([torch.tensor([part.first, now], dtype=torch.int64, device="cpu"), own])
        self._store.set(self._key(part, part.place), told.numpy().tobytes())

    def _hash(self, part: EmbeddingPart, token: int) -> int | None:
        """Hash of a token's row, on whichever rank it is."""
        for place in range(len(part.group)):
            key = self._key(part, place)
            # To get what is not there would wait for it.
            if not self._store.check([key]):
                continue
            told = torch.frombuffer(bytearray(self._store.get(key)), dtype=torch.int64)
            (first, at), hashes = told[:2].tolist(), told[2:]
            if first <= token < first + len(hashes):
                return int(hashes[token - first]) if at >= self._same_since else None
        return None

    def _key(self, part: EmbeddingPart, place: int) -> str:
        return f"canary/embedding/{self._name}/{'.'.join(map(str, part.group))}/{place}"


def row_hashes(weight: Tensor) -> Tensor:
    """A hash of the bits of each row of ``weight``, on the host: int64 ``[rows]``, 0 for a row that is all zero.

    The sum of a row's 64-bit words, each times an odd number of its place (mod 2**64), so that any change within one
    word gives another hash.
    """
    rows = weight.detach().flatten(1)
    row_bytes = rows.shape[1] * rows.element_size()
    word = torch.int64 if row_bytes % 8 == 0 else torch.uint8
    multipliers = keys(row_bytes // word.itemsize, rows.device)
    hashes = []
    for some in rows.split(max(1, SLICE_BYTES // (8 * len(multipliers)))):
        sums = (some.contiguous().view(word) * multipliers).sum(1)
        # Minus zero is zero, too.
        hashes.append(sums * some.any(1))
    return torch.cat(hashes).cpu()


def default_store() -> Any:
    """The store of torch.distributed's first group; None without one."""
    try:
        from torch.distributed import distributed_c10d

        return distributed_c10d._get_default_store()
    except Exception:
        # A private function; and none was made in a process by itself.
        return None
