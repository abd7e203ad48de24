"""`Identities`: conditions of a computation beside the tokens, such as the weights, a LoRA adapter or a cache salt."""

from collections import OrderedDict
from hashlib import blake2b
from typing import NamedTuple

from canary_core.events import escaped
from canary_core.kinds.facts import WEIGHTS
from canary_core.ops import hashing

MOST_NAME = 128
"""Characters of a name from outside that are kept."""

CHANGES = 1024
"""Changes of the weights that are remembered. KV from before an older one is not judged by its weights."""


class Identity(NamedTuple):
    """``weights``: number of the last change of the weights, or of the content of the adapter, 0 for none; the others
    see `Identities.anchor`, as they are `told`."""

    weights: int = 0
    lora: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None


class Identities:
    """Identities ↔ anchors of prefix hashes (`BatchView.anchors`). Sequences of two identities must not share slots:
    because anchors differ, a prefix hit across identities is a PREFIX finding. The last ``capacity`` are remembered by
    name.

    ``weights``: how often the weights, or an adapter's content, were changed so far.
    """

    def __init__(self, capacity: int = 65536) -> None:
        self._capacity = capacity
        self._anchors: OrderedDict[Identity, int] = OrderedDict()
        self._of: dict[int, Identity] = {hashing.COMMON_ANCHOR: Identity()}
        self.weights = 0
        self._every = 0
        # The last change of each adapter's content.
        self._adapters: OrderedDict[str, int] = OrderedDict()
        self._changes: OrderedDict[int, tuple[str, int]] = OrderedDict()

    def anchor(self, *, lora: str | None = None, cache_salt: str | None = None, extra_key: str | None = None) -> int:
        """The anchor of sequences that begin now, with a LoRA adapter, a cache salt, and a key of the engine's prefix
        cache; None for none. The same in every process with as many changes of the weights. Without any, the common
        anchor.

        Findings name an adapter. A salt or a key may be a secret, so findings give a digest.
        """
        texts = (None if text is None else told(text) for text in (lora, cache_salt, extra_key))
        return self.anchor_of(Identity(self.weights_of(lora), *texts))

    def weights_of(self, lora: str | None) -> int:
        """Number of the last change of what a request with the adapter ``lora``, None for none, is computed with."""
        if lora is None or not self._adapters:
            return self._every
        return max(self._every, self._adapters.get(told(lora), 0))

    def anchor_of(self, identity: Identity) -> int:
        """As `anchor`, of any weights."""
        known = self._anchors.get(identity)
        if known is not None:
            self._anchors.move_to_end(identity)
            return known
        if identity == Identity():
            return hashing.COMMON_ANCHOR
        said = {part: value for part, value in identity._asdict().items() if value is not None and value != 0}
        found = hashing.anchor(*(str(text) for pair in said.items() for text in pair))
        if len(self._anchors) >= self._capacity:
            _, oldest = self._anchors.popitem(last=False)
            del self._of[oldest]
        self._anchors[identity] = found
        self._of[found] = identity
        return found

    def of(self, anchor: int) -> Identity | None:
        """The identity of an anchor; None if forgotten or never given."""
        return self._of.get(anchor)

    def name(self, anchor: int) -> str | None:
        """The identity of an anchor, in words; None if forgotten or never given."""
        identity = self._of.get(anchor)
        return None if identity is None else self._words(identity, bool(identity.weights))

    def change_weights(self, how: str, since: int, lora: str | None = None) -> int:
        """The engine computes with other weights from now on, or with another content of the adapter ``lora``:
        sequences that begin later are not those from before. Returns the number of the change.

        ``how``: what changed them, for findings. ``since``: number of a forward known to have run before the change.
        """
        self.weights += 1
        if lora is None:
            self._every = self.weights
            self._adapters.clear()
        else:
            self._adapters[told(lora)] = self.weights
            self._adapters.move_to_end(told(lora))
            if len(self._adapters) > self._capacity:
                self._adapters.popitem(last=False)
        self._changes[self.weights] = told(how), since
        if len(self._changes) > CHANGES:
            self._changes.popitem(last=False)
        return self.weights

    def told_change(self, number: int) -> str:
        """A change of the weights in words, as `change_weights` was told of it."""
        how, since = self._changes.get(number, ("", 0))
        return f"weights_changed {number}{f', by {how}' if how else ''}{f', after step {since}' if since else ''}"

    def older(self, step: int, weights: int) -> bool:
        """Whether the forward ``step`` is known to have run before change ``weights``."""
        change = self._changes.get(weights)
        return change is not None and 0 < step <= change[1]

    def tell(self, own: int, other: int) -> tuple[str, str | None] | None:
        """Two anchors' identities in words, a reader's and a slot's, the latter None where forgotten; None if they are
        equal, or the reader's is unknown. Weights are named where these differ."""
        reader, slot = self._of.get(own), self._of.get(other)
        if reader is None or own == other:
            return None
        if slot is None:
            return self._words(reader, bool(reader.weights)), None
        apart = reader.weights != slot.weights
        return self._words(reader, apart), self._words(slot, apart)

    def pair(self, own: int, found: int, stored: int) -> tuple[int, int] | None:
        """The two anchors of a slot, read at any position, whose recorded prefix hash is ``stored`` instead of
        ``found``: where nothing but the weights makes the difference, else None. ``own``: the reader's anchor."""
        rest = self._of.get(own)
        if rest is None or not self.weights:
            return None
        recent = range(self.weights, max(self.weights - LOOKED_AT, -1), -1)
        for weights in dict.fromkeys((*recent, rest.weights, 0)):
            one = self.anchor_of(rest._replace(weights=weights))
            other = hashing.signed(one - (found - stored))
            if other != one and self.same_but_weights(one, other):
                return one, other
        return None

    def same_but_weights(self, one: int, other: int) -> bool:
        """Whether nothing but the weights tells the identities of two anchors apart; False where one is forgotten."""
        a, b = self._of.get(one), self._of.get(other)
        return a is not None and b is not None and a[1:] == b[1:]

    def _words(self, identity: Identity, weights: bool) -> str:
        said = [WEIGHTS + self._weights(identity.weights)] if weights else []
        for part in ("lora", "cache_salt", "extra_key"):
            text = getattr(identity, part)
            if text is not None:
                said.append(_NAMES[part].format(name=text, digest=_digest(text)))
        return ", ".join(said) or NONE

    def _weights(self, number: int) -> str:
        if not number:
            return "the start"
        how = self._changes.get(number, ("", 0))[0]
        return f"change {number}{f' ({how})' if how else ''}"


LOOKED_AT = 16
"""Last weights under which `Identities.pair` looks for a difference."""

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
