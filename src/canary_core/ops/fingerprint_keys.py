"""`FingerprintKeys`: the seeds of a Canary's fingerprints, and who else has them."""

import itertools
import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from hashlib import blake2b
from typing import Any, Literal

import torch
from torch import Tensor

from canary_core.config import CanaryConfig
from canary_core.errors import ConfigError
from canary_core.events import Event
from canary_core.ops import hashing

_SECRET = os.urandom(32)
"""This process's, and its children's by fork, which have its fingerprints, too."""


@dataclass(frozen=True, slots=True)
class FingerprintKeys:
    """Where the multipliers of `hashing` begin. ``kind``: ``public`` are the same everywhere, known to all; ``shared``
    those of a secret, the same wherever the secret is; ``seeded`` are this process's own, new with each start, or those
    of all an engine's ranks, where these are compared (``CANARY_RANKS_INTERVAL``).
    ``of_words``, ``of_sources``, ``of_places``: int64 seeds of `hashing.keys`, `salts` and `weights`; not to be shown.
    """

    kind: Literal["public", "seeded", "shared"]
    of_words: int = field(repr=False)
    of_sources: int = field(repr=False)
    of_places: int = field(repr=False)

    @property
    def id(self) -> int:
        """31 bits that say whether two sides have the same keys, and nothing about them; 0 for the public ones."""
        if self.kind == "public":
            return 0
        seeds = struct.pack("<3q", self.of_words, self.of_sources, self.of_places)
        return int.from_bytes(blake2b(seeds, digest_size=4, person=b"canary key id").digest(), "little") >> 1 or 1

    def words(self, words: int, device: torch.device | str = "cpu") -> Tensor:
        """See `hashing.keys`. On the host worked out once for a length: not to be changed."""
        return _words(self, words) if str(device) == "cpu" else hashing.keys(words, device, self.of_words)

    def sources(self, sources: int, device: torch.device | str = "cpu") -> Tensor:
        """See `hashing.salts`."""
        return hashing.salts(sources, device, self.of_sources)

    def places(self, slots: int, device: torch.device | str = "cpu") -> Tensor:
        """See `hashing.weights`."""
        return hashing.weights(slots, device, self.of_places)

    def fingerprints(self, words: Tensor, column: int) -> Tensor:
        """The fingerprint of each row of ``words`` (int32 ``[n, words]``, on the host) in the source with index
        ``column``: int64 ``[n]``."""
        return ((words.long() & 0xFFFFFFFF) * self.words(words.shape[1])).sum(1) + _salts(self, column // 64)[
            column % 64
        ]

    def told(self) -> dict[str, object]:
        """For a bundle: the seeds of this process's own keys, which are worth nothing elsewhere, and of a secret only
        which it is."""
        seeds = [] if self.kind == "shared" else [self.of_words, self.of_sources, self.of_places]
        return {"kind": self.kind, "id": self.id, "seeds": seeds}

    @classmethod
    def of_told(cls, told: Mapping[str, Any]) -> "FingerprintKeys | None":
        """From `told`; None where it is a secret that this process has not. Raises KeyError, TypeError or ValueError
        for anything else."""
        if told["seeds"]:
            words, sources, places = map(hashing.signed, told["seeds"])
            return cls("seeded" if told["id"] else "public", words, sources, places)
        if told["id"] not in _known:
            with suppress(ConfigError):
                cls.of(CanaryConfig.readable())
        return known_keys(told["id"])

    @classmethod
    def of(cls, config: CanaryConfig) -> "FingerprintKeys":
        """By the settings: of ``CANARY_KEY_FILE``, else as ``CANARY_KEYS`` says. Raises `ConfigError` where the file
        can't be used."""
        if config.key_file:
            from canary_core.config.key_file import read_key

            found = _drawn("shared", read_key("CANARY_KEY_FILE", config.key_file))
        elif config.keys == "public" or (config.keys == "auto" and config.exports):
            return PUBLIC
        else:
            found = _drawn("seeded", _common_secret() if config.ranks_interval else _SECRET)
        _known[found.id] = found
        return found


PUBLIC = FingerprintKeys("public", *map(hashing.signed, (hashing.KEY_SEED, hashing.SALT_SEED, hashing.WEIGHT_SEED)))
"""The keys of all engines without a secret that exchange fingerprints."""

_known: dict[int, FingerprintKeys] = {PUBLIC.id: PUBLIC}


def known_keys(id: int) -> FingerprintKeys | None:
    """The keys that this process has under the `FingerprintKeys.id`; None where it has another secret."""
    return _known.get(id)


def keys_reason(config: CanaryConfig) -> str:
    """Why the keys are public, or the secret is none; empty where all is well, or was asked for."""
    if config.key_file:
        from canary_core.config.key_file import open_to_others

        return open_to_others(config.key_file)
    if config.keys == "auto" and config.exports:
        return f"{config.exports} without CANARY_KEY_FILE: who writes to the pool may know the keys"
    return ""


def other_keys(what: str, number: int) -> Event:
    """``number`` of ``what`` can't be judged here."""
    reason = (
        f"{what} came that were fingerprinted with other keys than this engine's, or of another layout: nothing is "
        "judged by them; give all engines that exchange KV the same CANARY_KEY_FILE, or none of them one, and the same "
        "CANARY_BYTES and CANARY_LAYERS"
    )
    return Event("other_keys", "warning", {"with": what, "number": number, "reason": reason})


@cache
def _common_secret() -> bytes:
    """The same in all processes that `multiprocessing` began below one main process, as engines begin their ranks:
    drawn there at its start, and handed down through pipes, in no file and no environment. As it is at the first call.
    """
    from multiprocessing import current_process

    return bytes(current_process().authkey)


@cache
def _drawn(kind: Literal["seeded", "shared"], secret: bytes) -> FingerprintKeys:
    """The first seeds of ``secret``, the same in every process, whose keys tell any two flipped bits."""
    numbers = (_seeds(kind, secret, number) for number in itertools.count())
    return next(found for found in numbers if hashing.are_sure(found.words(hashing.SURE_WORDS)))


def _seeds(kind: Literal["seeded", "shared"], secret: bytes, number: int) -> FingerprintKeys:
    drawn = blake2b(secret, digest_size=24, person=b"canary keys", salt=number.to_bytes(8, "little")).digest()
    return FingerprintKeys(kind, *struct.unpack("<3q", drawn))


@lru_cache(maxsize=8)
def _words(keys: FingerprintKeys, words: int) -> Tensor:
    with torch.inference_mode(False):
        return hashing.keys(words, seed=keys.of_words)


@lru_cache(maxsize=64)
def _salts(keys: FingerprintKeys, block: int) -> Tensor:
    with torch.inference_mode(False):
        return keys.sources(block * 64 + 64)[block * 64 :]
