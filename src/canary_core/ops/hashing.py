"""The two hashes, on int64 torch tensors (wrapping arithmetic), and their constants.

Prefix hash: ``h[p] = h[p-1] + mix(token[p], position[p])  (mod 2**64)``. A sum, so a whole prefill is one parallel
scan; `mix` is a bijection of (position, token), so any single different token or position gives another hash.

Bytes fingerprint of one slot in one source: ``salt(source) + sum(word[i] * key[i])  (mod 2**64)`` over the slot's
32-bit little-endian words (a chunk's tail is padded with zero bytes). Addition commutes, so any tiling agrees. Keys are
odd and depend on the word's index alone; the salt sets sources apart, so a fingerprint of one source does not fit
another. A ledger's block has ``sum(fingerprint[slot] * weight[place])``. All three come from seeds: public ones, or
those of a secret, see `fingerprint_keys`.

Let ``v`` (0 to 31) be the lowest bit in which any word changed. Seen with certainty, because keys are odd:

- any change within one word; more generally any change in which an odd number of words differ in bit ``v``;
- any two flipped bits, in a slot of at most `SURE_WORDS` words a source: only where both are the same bit of their
  words could they cancel, and only if the two keys' sum or difference were 0 modulo 2**33. Of the public keys a test
  looks at every pair of the first `SURE_PUBLIC_WORDS`; other seeds are drawn until the first `SURE_WORDS` are so, too.
  Beyond, two flips of the same bit are missed with probability 2**-32 in each pair of words.

Any other change is missed with probability ``2**(v - 63)``: ``2**-63`` if a word's lowest bit changed, ``2**-48`` if
signs of bfloat16 did (bit 15), ``2**-32`` at worst, for four words or more with changes in their top bits only. The
probability is over the keys (multilinear hashing: Carter & Wegman, 1979; Lemire & Kaser, "Strongly universal string
hashing is fast", 2014), as far as `splitmix` of an unknown seed is as good as a random number. It holds against faults,
which know nothing of the keys, whatever the seeds. Against somebody who writes to the pool with a collision in mind it
holds while the keys are secret and no fingerprint is seen: the sum is linear, so whoever sees as many fingerprints of
known bytes as a slot has words can work out the keys. Public keys protect nobody against that.

The prefix hash has no secret: it is of tokens and positions, which are compared beside it, must be the same number in
every engine that exchanges KV, and takes no bytes in.

The finaliser is splitmix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", 2014).
"""

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLY_1 = 0xBF58476D1CE4E5B9
MULTIPLY_2 = 0x94D049BB133111EB
KEY_SEED = 0x243F6A8885A308D3
SALT_SEED = 0x13198A2E03707344
ANCHOR_SEED = 0x0082EFA98EC4E6C9
WEIGHT_SEED = 0x452821E638D01377
SURE_PUBLIC_WORDS = 97873
"""Number of leading public keys without a pair whose sum or difference is 0 modulo 2**33."""
SURE_WORDS = 16384
"""The same of every seed that is used, public or not."""
_MASK = (1 << 64) - 1


def signed(value: int) -> int:
    """The int64 with the bits of the unsigned 64-bit ``value``."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


COMMON_ANCHOR = signed(ANCHOR_SEED)
"""Start value ``h[-1]`` of the prefix hash of a sequence that may share slots with any other: `anchor` of no salt."""


def splitmix(x: Tensor) -> Tensor:
    """splitmix64's output for the state ``x`` (int64, any shape): adds the golden ratio, then mixes."""
    x = x + signed(GOLDEN)
    x = (x ^ _shift_right(x, 30)) * signed(MULTIPLY_1)
    x = (x ^ _shift_right(x, 27)) * signed(MULTIPLY_2)
    return x ^ _shift_right(x, 31)


def mix(tokens: Tensor, positions: Tensor) -> Tensor:
    """Contribution of each (token, position) to a prefix hash; integer tensors of one shape, gives int64."""
    return splitmix((positions.long() << 32) | (tokens.long() & 0xFFFFFFFF))


def keys(words: int, device: torch.device | str = "cpu", seed: int = KEY_SEED) -> Tensor:
    """The odd int64 multipliers of words ``0 .. words-1`` of a slot, ``[words]``."""
    return splitmix(torch.arange(words, dtype=torch.int64, device=device) + signed(seed)) | 1


def salts(sources: int, device: torch.device | str = "cpu", seed: int = SALT_SEED) -> Tensor:
    """The odd start value of each source's fingerprint, ``[sources]``: zero bytes never fingerprint to zero, and
    fingerprints carried to another source do not fit there."""
    return splitmix(torch.arange(sources, dtype=torch.int64, device=device) + signed(seed)) | 1


def weights(slots: int, device: torch.device | str = "cpu", seed: int = WEIGHT_SEED) -> Tensor:
    """The odd int64 multipliers of the fingerprints of a block's slots, by place in the block, ``[slots]``: exchanged
    slots make another value."""
    return splitmix(torch.arange(slots, dtype=torch.int64, device=device) + signed(seed)) | 1


def are_sure(multipliers: Tensor) -> bool:
    """Whether no two of the odd ``multipliers`` have a sum or a difference that is 0 modulo 2**33."""
    low = multipliers & ((1 << 33) - 1)
    return len(torch.minimum(low, (1 << 33) - low).unique()) == len(multipliers)


def inverse(odd: Tensor) -> Tensor:
    """Inverses of odd numbers modulo 2**64, by Newton: each round doubles the right bits, three to begin with."""
    found = odd.clone()
    for _ in range(5):
        found = found * (2 - odd * found)
    return found


def only_word(words: Tensor, factors: Tensor, difference: int) -> tuple[int, int] | None:
    """Index of the only word that can have changed alone, and its value before; None where there is no such word, or
    several. ``words``: the present ones, int64 ``[n]``, each below 2**32. ``factors``: `keys` of as many.
    ``difference``: fingerprint before minus the present one, ``(before - now) * key``."""
    before = words + signed(difference) * inverse(factors)
    # A 64-bit number, and one of 32 bits only by chance where another word changed.
    fits = ((before >= 0) & (before <= 0xFFFFFFFF) & (before != words)).nonzero()[:, 0].tolist()
    return (fits[0], int(before[fits[0]])) if len(fits) == 1 else None


def anchor(*salt: str) -> int:
    """Start value ``h[-1]`` of a prefix hash for sequences that must not share slots with others: model, LoRA name,
    cache salt, image digest. No salt gives the common anchor. The same strings give the same value in every process.
    """
    value = COMMON_ANCHOR
    for text in salt:
        for byte in text.encode(errors="surrogatepass") + b"\0":
            value = _splitmix(value ^ byte)
    return value


def mixed(token: int, position: int) -> int:
    """`mix` of one token, on the host."""
    return _splitmix(position << 32 | token & 0xFFFFFFFF)


def _splitmix(x: int) -> int:
    """`splitmix` of one number: a tensor would take milliseconds for the anchor of a long name."""
    x = (x + GOLDEN) & _MASK
    x = (x ^ x >> 30) * MULTIPLY_1 & _MASK
    x = (x ^ x >> 27) * MULTIPLY_2 & _MASK
    return signed(x ^ x >> 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's ``>>`` on int64 keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
