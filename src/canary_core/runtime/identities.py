"""`Identities`: what tokens were computed for beside being these tokens, such as a LoRA adapter or a cache salt."""

from collections import OrderedDict
from hashlib import blake2b

from canary_core.ops import hashing


class Identities:
    """Identities ↔ anchors of prefix hashes (`BatchView.anchors`). Sequences of two identities must not share slots:
    with other anchors, a prefix hit across them is a PREFIX finding. The last ``capacity`` are remembered by name."""

    def __init__(self, capacity: int = 65536) -> None:
        self._capacity = capacity
        self._anchors: OrderedDict[tuple[str | None, ...], int] = OrderedDict()
        self._names: dict[int, str] = {}

    def anchor(self, *, lora: str | None = None, cache_salt: str | None = None, extra_key: str | None = None) -> int:
        """The anchor of sequences with this LoRA adapter, cache salt, and key of the engine's prefix cache; None for
        none. The same in every process. Without any of them it is the common one.

        Findings name an adapter. Of a salt and a key, which may be secrets, they give a digest."""
        given = (lora, cache_salt, extra_key)
        known = self._anchors.get(given)
        if known is not None:
            self._anchors.move_to_end(given)
            return known
        parts = dict(zip(("lora", "cache_salt", "extra_key"), given, strict=True))
        said = {part: text for part, text in parts.items() if text is not None}
        if not said:
            return hashing.COMMON_ANCHOR
        found = hashing.anchor(*(text for pair in said.items() for text in pair))
        if len(self._anchors) >= self._capacity:
            _, oldest = self._anchors.popitem(last=False)
            del self._names[oldest]
        self._anchors[given] = found
        self._names[found] = ", ".join(
            _NAMES[part].format(name=text, digest=_digest(text)) for part, text in said.items()
        )
        return found

    def name(self, anchor: int) -> str | None:
        """The identity with this anchor, in words; None if it was forgotten or never given."""
        return NONE if anchor == hashing.COMMON_ANCHOR else self._names.get(anchor)

    def tell(self, token: int, found: int, stored: int) -> tuple[str, str | None] | None:
        """For a slot that is read as position 0 and holds ``token`` there: the identity of who reads it, whose prefix
        hash ``found`` would be there, and the identity of which it is, by its own hash ``stored``, None where that
        was forgotten. None unless the identity is what differs."""
        mixed = hashing.mixed(token, 0)
        own, other = hashing.signed(found - mixed), hashing.signed(stored - mixed)
        name = self.name(own)
        return None if name is None or own == other else (name, self.name(other))


NONE = "no LoRA adapter, cache salt or extra key"
"""The identity of most sequences."""

_NAMES = {"lora": "LoRA adapter {name}", "cache_salt": "cache salt #{digest}", "extra_key": "extra key #{digest}"}


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=4).hexdigest()
