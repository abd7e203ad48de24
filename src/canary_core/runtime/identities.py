"""`Identities`: conditions of a computation beside the tokens, such as a LoRA adapter or a cache salt."""

from collections import OrderedDict
from hashlib import blake2b

from canary_core.ops import hashing


class Identities:
    """Identities ↔ anchors of prefix hashes (`BatchView.anchors`). Sequences of two identities must not share slots:
    because anchors differ, a prefix hit across identities is a PREFIX finding. The last ``capacity`` are remembered by
    name."""

    def __init__(self, capacity: int = 65536) -> None:
        self._capacity = capacity
        self._anchors: OrderedDict[tuple[str | None, ...], int] = OrderedDict()
        self._names: dict[int, str] = {}

    def anchor(self, *, lora: str | None = None, cache_salt: str | None = None, extra_key: str | None = None) -> int:
        """The anchor of sequences with a LoRA adapter, a cache salt, and a key of the engine's prefix cache; None for
        none. The same in every process. Without any, the common anchor.

        Findings name an adapter. A salt or a key may be a secret, so findings give a digest.
        """
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
        """The identity of an anchor, in words; None if forgotten or never given."""
        return NONE if anchor == hashing.COMMON_ANCHOR else self._names.get(anchor)

    def tell(self, token: int, found: int, stored: int) -> tuple[str, str | None] | None:
        """Identities of reader and slot, for a slot read as position 0 that holds ``token`` there: the reader's, with
        prefix hash ``found``, and the slot's, with recorded hash ``stored``, None where forgotten. None if the two
        identities are equal, or the reader's is unknown."""
        mixed = hashing.mixed(token, 0)
        own, other = hashing.signed(found - mixed), hashing.signed(stored - mixed)
        name = self.name(own)
        return None if name is None or own == other else (name, self.name(other))


NONE = "no LoRA adapter, cache salt or extra key"
"""The identity of most sequences."""

_NAMES = {"lora": "LoRA adapter {name}", "cache_salt": "cache salt #{digest}", "extra_key": "extra key #{digest}"}


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=4).hexdigest()
