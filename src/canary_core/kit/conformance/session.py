"""`EngineSession`: the conformance suite's controls of an engine, to drive and to break it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from torch import Tensor

Ability = Literal[
    "slot_mapping",
    "lifetime",
    "padding",
    "prefix_cache",
    "park",
    "evict",
    "preempt",
    "fork",
    "roll_back",
    "raise",
    "uninstall",
]
"""Abilities of an engine, followed by its plugin:

| ability        | the engine                                             | `EngineSession` has                  |
|----------------|--------------------------------------------------------|--------------------------------------|
| `slot_mapping` | has a list of the slots to be written by a forward,    | `misplace_write`                     |
|                | beside the table to read                               |                                      |
| `lifetime`     | has an allocator that hands slots out and gets them    | `release_running`                    |
|                | back                                                   |                                      |
| `padding`      | pads batches with rows without a request               |                                      |
| `prefix_cache` | reuses the slots of a prompt's beginning               |                                      |
| `park`         | keeps slots without a holder in the prefix cache       | `release_again`, `hand_out_cached`   |
| `evict`        | empties its prefix cache on demand                     | `evict`                              |
| `preempt`      | takes a running request's slots away, and computes it  | `preempt`                            |
|                | again later                                            |                                      |
| `fork`         | lets a request go on as two                            | `fork`                               |
| `roll_back`    | drops a request's last tokens and computes them again  | `roll_back`                          |
| `raise`        | lets an exception in its forward reach its caller      |                                      |
| `uninstall`    | is its own again after `canary_uninstall`              | the suite has an ``engine_package``  |
"""

ABILITIES: tuple[Ability, ...] = get_args(Ability)
"""All abilities, in the order of the support matrix."""


class EngineSession(ABC):
    """A small run of an engine, driven from outside of Canary and of its plugin.

    Must not use the adapter: the suite finds errors of the adapter, and an error common to both stays unseen. Answers
    are greedy, with weights from a fixed seed: the same requests give the same answers.
    """

    @abstractmethod
    def pool_tensors(self) -> Mapping[str, Tensor]:
        """Every tensor with KV of the engine, scales and the like included, under the engine's own names."""

    @abstractmethod
    def submit(self, request: str, tokens: Sequence[int], new_tokens: int) -> None:
        """A request named ``request``: a prompt of ``tokens``, to be answered with ``new_tokens`` tokens. Begins with
        the next `step`."""

    @abstractmethod
    def step(self) -> bool:
        """Runs one forward of all requests that can run. False if nothing was left to run."""

    @abstractmethod
    def answer(self, request: str) -> Sequence[int]:
        """The tokens generated for ``request`` so far; also after its end."""

    @abstractmethod
    def poke(self, layer: int, half: str, request: str, position: int) -> None:
        """Flips one bit of what the running ``request`` has at ``position`` in ``half`` (one of the suite's
        ``halves``) of ``layer``, in the engine's own memory, found through the engine's own tables."""

    def close(self) -> None:
        """The engine is not needed any more."""
        return None

    def misplace_write(self, request: str) -> None:
        """Ability ``slot_mapping``: the next forward stores a new token of ``request`` in another slot than the
        table's, by mistake."""
        raise self._missing("misplace_write", "slot_mapping")

    def release_running(self, request: str) -> None:
        """Ability ``lifetime``: the engine gives the slots of a running request back to its allocator, by mistake: the
        request goes on. At least one of the slots has no other holder."""
        raise self._missing("release_running", "lifetime")

    def release_again(self, request: str) -> None:
        """Ability ``park``: a finished ``request``'s slots in the prefix cache are released once more."""
        raise self._missing("release_again", "park")

    def hand_out_cached(self) -> None:
        """Ability ``park``: the allocator hands out, to anybody, slots kept by the prefix cache and held by no request,
        without evicting them."""
        raise self._missing("hand_out_cached", "park")

    def evict(self) -> None:
        """Ability ``evict``: the prefix cache drops all slots without a request."""
        raise self._missing("evict", "evict")

    def preempt(self, request: str) -> None:
        """Ability ``preempt``: ``request`` loses its slots and is computed again in later steps."""
        raise self._missing("preempt", "preempt")

    def fork(self, request: str, child: str) -> None:
        """Ability ``fork``: a second request ``child`` goes on from the present state of ``request``."""
        raise self._missing("fork", "fork")

    def roll_back(self, request: str, tokens: int) -> None:
        """Ability ``roll_back``: the last ``tokens`` tokens of the running ``request`` are dropped and generated anew.
        (The last one generated has no KV yet.)"""
        raise self._missing("roll_back", "roll_back")

    def _missing(self, method: str, ability: Ability) -> NotImplementedError:
        name = type(self).__name__
        return NotImplementedError(f"ability {ability!r} needs {name}.{method}; write it, or take the ability out")
