"""`Change`: one chunk of a parameter with other bytes than before, and the word to blame, by fingerprint and bytes."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from canary_core.ops import hashing
from canary_core.ops.fingerprint_keys import FingerprintKeys
from canary_core.ops.torch.weights import words_of
from canary_core.watchers.weights.parameters import WeightStretch

FEW_ELEMENTS = 16
"""A smaller parameter, such as a scale, may be given another value by a single word, or a single bit."""


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """A differing chunk of ``stretch``: bytes ``begin`` to ``end``. ``found``: the fingerprint now. ``data``: the bytes
    now, uint8, on the host. ``word``: index of the only 32-bit word able to explain the change alone, from ``old`` to
    ``new``; None where several have changed."""

    stretch: WeightStretch
    begin: int
    end: int
    found: int
    data: Tensor
    word: int | None = None
    old: int = 0
    new: int = 0

    def solved(self, stored: int, keys: FingerprintKeys) -> "Change":
        """With `word`, by the fingerprint ``stored`` of before. By chance, one in 2**17, a word fits where several have
        changed."""
        words = words_of(self.data)
        found = hashing.only_word(words, keys.words(len(words)), stored - self.found)
        return self if found is None else replace(self, word=found[0], old=found[1], new=int(words[found[0]]))

    @property
    def bit(self) -> int | None:
        """The only changed bit of the word, None where there are several."""
        bits = self.old ^ self.new
        return bits.bit_length() - 1 if self.word is not None and bits & (bits - 1) == 0 else None

    @property
    def certain(self) -> bool:
        """Whether no update changes so little: a word, or of a buffer a bit, of many elements."""
        if self.word is None or self.stretch.elements < FEW_ELEMENTS:
            return False
        return self.bit is not None or not self.stretch.buffer

    def element(self) -> tuple[int, tuple[int, ...], str, str]:
        """The first changed element: number, indices, old and new value, both values with the bits."""
        size = self.stretch.dtype.itemsize
        unit, word = max(size, 4), (self.word or 0) * 4
        first = word // unit * unit
        now = self.data[first : first + unit].clone()
        before = now.clone()
        # Behind the end there are zeros.
        old = torch.tensor([self.old], dtype=torch.int64, device="cpu").view(torch.uint8)[:4]
        before[word - first : word - first + 4] = old[: len(before) - (word - first)]
        at = int((before != now).nonzero()[0, 0]) // size * size
        values = (_said(one[at : at + size], self.stretch.dtype) for one in (before, now))
        return (*self.stretch.place_of(self.begin + first + at), *values)  # type: ignore[return-value]


def _said(data: Tensor, dtype: torch.dtype) -> str:
    bits = int.from_bytes(bytes(data.tolist()), "little")
    value = data.clone().view(dtype)[0]
    try:
        number = f"{float(value):.6g}" if dtype.is_floating_point else str(value.item())
    except (RuntimeError, TypeError):  # A sort of bits that torch can't read as a number.
        number = ""
    return f"{number} (0x{bits:0{2 * len(data)}x})".strip()
