"""`patterns`: shapes of damaged bytes: a flipped bit, zeros, NaN, one byte all over, or another."""

from collections.abc import Iterator

import torch
from torch import Tensor

from canary_core.kinds.case import Pattern
from canary_core.ops import hashing
from canary_core.ops.fingerprint_keys import FingerprintKeys
from canary_core.ops.repair_rows import is_flip
from canary_desk.incidents.evidence import Evidence, SourceFacts

_NUMBERS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


MOST_PATTERNS = 192
"""Most slots and sources to look at, a millisecond each."""


def patterns(evidence: Evidence) -> Iterator[Pattern]:
    """A pattern for each slot and source with bytes in the evidence that differ from the record; at most
    `MOST_PATTERNS`, spread over all. None without the keys of the fingerprints."""
    keys = evidence.keys
    if keys is None:
        return
    differs = evidence.differs[evidence.read] if evidence.read else evidence.differs[:0]
    places = differs.nonzero().tolist()
    for place, column in places[:: max(1, -(-len(places) // MOST_PATTERNS))]:
        row, source = evidence.read[place], evidence.sources[column]
        slot, words = int(evidence.slots[row]), evidence.words[source.name][place]
        stored = int(evidence.stored[row, column])
        found = int(keys.fingerprints(words[None], column)[0])
        if found != stored:
            yield _pattern(slot, source, words, keys, stored - found)


def _pattern(slot: int, source: SourceFacts, words: Tensor, keys: FingerprintKeys, difference: int) -> Pattern:
    name = source.name
    content = words.contiguous().view(torch.uint8)
    if not bool(content.any()):
        return Pattern(slot, name, "zeros")
    if bool((content == content[0]).all()):
        return Pattern(slot, name, "constant", byte=int(content[0]), not_finite=_not_finite(source, words))
    flipped = _one_word(words, keys, difference) or _two_bits(words, keys, difference)
    if flipped is not None:
        index, old, new = flipped
        shape = "two_bits" if len(index) == 2 else "bit" if is_flip(old[0] ^ new[0]) else "word"
        return Pattern(slot, name, shape, index, old, new)
    share = _not_finite(source, words)
    return Pattern(slot, name, "nan" if share > 0.5 else "other", not_finite=share)


def _not_finite(source: SourceFacts, words: Tensor) -> float:
    dtype = _NUMBERS.get(source.dtype)
    if dtype is None:
        return 0.0
    return float((~torch.isfinite(words.contiguous().view(dtype))).float().mean())


Flip = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _one_word(words: Tensor, keys: FingerprintKeys, difference: int) -> Flip | None:
    """The only word that can have changed alone, before and after."""
    new = words.long() & 0xFFFFFFFF
    found = hashing.only_word(new, keys.words(len(words)), difference)
    return None if found is None else ((found[0],), (found[1],), (int(new[found[0]]),))


def _two_bits(words: Tensor, keys: FingerprintKeys, difference: int) -> Flip | None:
    """The only pair of bits, in two words, that can have flipped: the change by each bit is looked up among the
    differences left by the other bits."""
    key = keys.words(len(words))
    new = words.long() & 0xFFFFFFFF
    bits = torch.arange(32, device="cpu")
    # What flipping a bit back adds to the fingerprint.
    change = torch.where((new[:, None] >> bits) & 1 == 1, -(key[:, None] << bits), key[:, None] << bits).view(-1)
    order = change.sort()
    rest = hashing.signed(difference) - change
    place = torch.searchsorted(order.values, rest).clamp(max=len(change) - 1)
    hits = (order.values[place] == rest).nonzero()[:, 0].tolist()
    pairs = {tuple(sorted((one, int(order.indices[place[one]])))) for one in hits}
    pairs = {pair for pair in pairs if pair[0] // 32 != pair[1] // 32}
    if len(pairs) != 1:
        return None
    (pair,) = pairs
    index = tuple(bit // 32 for bit in pair)
    now = tuple(int(new[word]) for word in index)
    return index, tuple(value ^ 1 << bit % 32 for value, bit in zip(now, pair, strict=True)), now
