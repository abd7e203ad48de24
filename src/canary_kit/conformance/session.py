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
    "token_ids",
    "positions",
    "lengths",
    "tables",
    "names",
    "copies",
    "graphs",
    "sampled",
    "identities",
    "contents",
    "weights",
    "read_tables",
    "stores",
]
"""Abilities of an engine, followed by its plugin. Methods of the last twelve plant a bug on purpose:

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
| `token_ids`    | copies a request's tokens to the input of a forward    | `misfeed`                            |
| `positions`    | gives a forward positions beside the lengths           | `shift_positions`                    |
| `lengths`      | gives a forward lengths beside those of its scheduler  | `miscount`                           |
| `tables`       | gives a forward a table beside its scheduler's lists   | `misplace_read`                      |
| `names`        | lets a request have the name of an earlier one         |                                      |
| `copies`       | copies slots, at a fork                                | `miscopy`                            |
| `graphs`       | runs forwards on buffers that never move               | `keep_stale`                         |
| `sampled`      | has a sampler, whose tokens the plugin follows         | `misfeed`                            |
| `identities`   | keeps prefixes apart by adapter, salt or another key   | `submit_as`, `mix_identities`        |
| `contents`     | takes embeddings in the place of a prompt's tokens     | `submit_embedded`, `mix_contents`    |
| `weights`      | can go on with other weights                           | `change_weights`                     |
| `read_tables`  | makes tables of its own for attention                  | `misread`                            |
| `stores`       | stores K and V of a layer by a function                | `spoil_store`                        |
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
        request goes on. At least one of the slots has no other holder and is not in the prefix cache; where each is
        there at once, the suite evicts afterwards."""
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

    def misfeed(self, request: str) -> None:
        """Abilities ``token_ids`` and ``sampled``: the next forward with ``request`` computes another token in the
        place of its last new one; the request's own list stays right."""
        raise self._missing("misfeed", "token_ids")

    def shift_positions(self, request: str) -> None:
        """Ability ``positions``: the next forward with ``request`` gives its new tokens positions that are one higher,
        and nothing else changes."""
        raise self._missing("shift_positions", "positions")

    def miscount(self, request: str, tokens: int) -> None:
        """Ability ``lengths``: to the next forward with ``request`` so many more of its tokens (fewer, where negative)
        have KV than really do; the scheduler's own count stays right."""
        raise self._missing("miscount", "lengths")

    def misplace_read(self, request: str, position: int, other: str) -> None:
        """Ability ``tables``: the next forward with ``request`` reads, at ``position``, from the slot of the running
        ``other`` at the same position (with pages: the whole page); the scheduler's own lists stay right. The
        wrong entry may stay where it is afterwards."""
        raise self._missing("misplace_read", "tables")

    def miscopy(self, layer: int, half: str) -> None:
        """Ability ``copies``: the next copy of slots leaves ``half`` of ``layer`` out."""
        raise self._missing("miscopy", "copies")

    def keep_stale(self, request: str) -> None:
        """Ability ``graphs``: in the buffers of the next forward with ``request``, its last new token is the one that
        stood there before, or any other."""
        raise self._missing("keep_stale", "graphs")

    def submit_as(self, identity: str, request: str, tokens: Sequence[int], new_tokens: int) -> None:
        """Ability ``identities``: as `submit`, with an adapter, a cache salt or another key named ``identity``."""
        raise self._missing("submit_as", "identities")

    def submit_embedded(self, seed: int, request: str, tokens: Sequence[int], new_tokens: int) -> None:
        """Ability ``contents``: as `submit`, with embeddings drawn by ``seed`` in the place of the first half of the
        prompt's tokens."""
        raise self._missing("submit_embedded", "contents")

    def mix_contents(self) -> None:
        """Ability ``contents``: from now on requests hit prefixes whatever embeddings these were computed of."""
        raise self._missing("mix_contents", "contents")

    def change_weights(self, kept: bool) -> None:
        """Ability ``weights``: the engine's own update, to other weights than it ever had. ``kept``: the prefix cache
        is kept, by mistake; else what older weights have computed is dropped. No request runs."""
        raise self._missing("change_weights", "weights")

    def mix_identities(self) -> None:
        """Ability ``identities``: from now on requests hit prefixes of every identity."""
        raise self._missing("mix_identities", "identities")

    def misread(self, request: str) -> None:
        """Ability ``read_tables``: in the next forward with ``request``, the table that attention is given names
        another slot at one of its positions; the engine's own table stays right. Called before each of several
        forwards: one table of each is compared, and another one in the next."""
        raise self._missing("misread", "read_tables")

    def spoil_store(self, layer: int, half: str, request: str) -> None:
        """Ability ``stores``: in the next forward with ``request``, a bit of its newest token in ``half`` of ``layer``
        flips right after that layer was stored."""
        raise self._missing("spoil_store", "stores")

    def _missing(self, method: str, ability: Ability) -> NotImplementedError:
        name = type(self).__name__
        return NotImplementedError(f"ability {ability!r} needs {name}.{method}; write it, or take the ability out")
