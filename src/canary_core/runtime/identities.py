"""`Identities`: conditions of a computation beside the tokens, such as a LoRA adapter or a cache salt."""

from collections import OrderedDict
from hashlib import blake2b

from canary_core.events import escaped
from canary_core.ops import hashing

MOST_NAME = 128
"""Characters of a name from outside that are kept."""


class Identities:
    """Identities ↔ anchors of prefix hashes (`BatchView.anchors`). Sequences of two identities must not share slots:
    because anchors differ, a prefix hit across identities is a PREFIX finding. The last ``capacity`` are remembered by
    name."""

    def __init__(self, capacity: int = 65536) -> None:
        self._capacity = capacity
        self._anchors: OrderedDict[tuple[str | bytes | None, ...], int] = OrderedDict()
        self._names: dict[int, str] = {}

    def anchor(self, *, lora: str | None = None, cache_salt: str | None = None, extra_key: str | None = None) -> int:
        """The anchor of sequences with a LoRA adapter, a cache salt, and a key of the engine's prefix cache; None for
        none. The same in every process. Without any, the common anchor.

        Findings name an adapter. A salt or a key may be a secret, so findings give a digest.
        """
        parts = dict(zip(("lora", "cache_salt", "extra_key"), (lora, cache_salt, extra_key), strict=True))
        given = tuple(None if text is None else name_key(text) for text in parts.values())
        known = self._anchors.get(given)
        if known is not None:
            self._anchors.move_to_end(given)
            return known
        said = {part: text for part, text in parts.items() if text is not None}
        if not said:
            return hashing.COMMON_ANCHOR
        found = hashing.anchor(*(text for pair in said.items() for text in pair))
        if len(self._anchors) >= self._capacity:
            _, oldest = self._anchors.popitem(last=False)
            del self._names[oldest]
        self._anchors[given] = found
        self._names[found] = ", ".join(
            _NAMES[part].format(name=told(text), digest=_digest(text)) for part, text in said.items()
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


def name_key(name: str) -> str | bytes:
    """A name from outside, to remember it by: itself, or a digest of a long one, or of one that can't be printed."""
    plain = len(name) <= MOST_NAME and name.isprintable()
    return name if plain else blake2b(name.encode(errors="surrogatepass"), digest_size=16).digest()


def told(name: str) -> str:
    """A name from outside as every output has it: one printable line of `MOST_NAME` characters and, where that is not
    all of it, a digest."""
    key = name_key(name)
    return key if isinstance(key, str) else f"{escaped(name[:MOST_NAME])[:MOST_NAME]}#{key.hex()[:16]}"


def _digest(text: str) -> str:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=4).hexdigest()
