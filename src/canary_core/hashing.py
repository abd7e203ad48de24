"""The two hashes, on int64 torch tensors (wrapping arithmetic), and their constants.

Prefix hash: ``h[p] = h[p-1] + mix(token[p], position[p])  (mod 2**64)``. A sum, so a whole prefill is one parallel
scan; `mix` is a bijection of (position, token), so any single different token or position gives another hash.

Bytes fingerprint of one slot in one source: ``salt(source) + sum(word[i] * key[i])  (mod 2**64)`` over the slot's
32-bit little-endian words (a chunk's tail is padded with zero bytes). Keys are odd, so any change within one word is
caught with certainty; a change of several words is missed with probability at most ``2**-32`` over the keys (two words
that differ in their top bit only), and ``2**-63`` for differences that are odd (multilinear hashing: Carter & Wegman,
1979; Lemire & Kaser, "Strongly universal string hashing is fast", 2014). Addition commutes, so any tiling agrees.

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
_MASK = (1 << 64) - 1


def signed(value: int) -> int:
    """The int64 with the bits of the unsigned 64-bit ``value``."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def splitmix(x: Tensor) -> Tensor:
    """splitmix64's output for the state ``x`` (int64, any shape): adds the golden ratio, then mixes."""
    x = x + signed(GOLDEN)
    x = (x ^ _shift_right(x, 30)) * signed(MULTIPLY_1)
    x = (x ^ _shift_right(x, 27)) * signed(MULTIPLY_2)
    return x ^ _shift_right(x, 31)


def mix(tokens: Tensor, positions: Tensor) -> Tensor:
    """Contribution of each (token, position) to a prefix hash; integer tensors of one shape, gives int64."""
    return splitmix((positions.long() << 32) | (tokens.long() & 0xFFFFFFFF))


def keys(words: int, device: torch.device | str = "cpu") -> Tensor:
    """The odd int64 multipliers of words ``0 .. words-1`` of a slot, ``[words]``."""
    return splitmix(torch.arange(words, dtype=torch.int64, device=device) + signed(KEY_SEED)) | 1


def salts(sources: int, device: torch.device | str = "cpu") -> Tensor:
    """The odd start value of each source's fingerprint, ``[sources]``: zero bytes never fingerprint to zero, and
    fingerprints carried to another source do not fit there."""
    return splitmix(torch.arange(sources, dtype=torch.int64, device=device) + signed(SALT_SEED)) | 1


def anchor(*salt: str) -> int:
    """Start value ``h[-1]`` of a prefix hash for sequences that must not share slots with others: model, LoRA name,
    cache salt, image digest. No salt gives the common anchor. The same strings give the same value in every process.
    """
    value = signed(ANCHOR_SEED)
    for text in salt:
        for byte in text.encode() + b"\0":
            value = int(splitmix(torch.tensor(value ^ byte)))
    return value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's ``>>`` on int64 keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
