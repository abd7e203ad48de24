"""HiCache's storage back ends: loads are compared with the engine's own stores, by the ledger.

KV in host memory may go on to a storage back end (a disk, a server), and comes back to other host slots without
records. The ledger knows it by prefix: by the tokens of the request that SGLang loads for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from canary_core import Arrival, Canary, Origin
from canary_sglang.batches.tokens import as_array
from canary_sglang.batches.writers import RequestWriters
from canary_sglang.compat import progress, schedulers


@dataclass(frozen=True, slots=True, eq=False)
class Sought:
    """The request of a queued load: its tokens from position ``first`` on, of the request's ``tokens`` up to the last
    loaded one, int64 on the host."""

    request: Any
    first: int
    tokens: Tensor

    def part(self, begin: int, end: int) -> "Sought":
        """The loaded tokens from ``begin`` to ``end``."""
        return Sought(self.request, self.first + begin, self.tokens[: self.first + end])


class StoredPages:
    """Pages of the full pool possibly held by a storage back end, for one session's pool. ``region``: its name."""

    def __init__(self, canary: Canary, region: str, requests: RequestWriters) -> None:
        self._canary = canary
        self._region = region
        self._requests = requests
        self._sought: WeakKeyDictionary[Any, Sought] = WeakKeyDictionary()

    def leaving(self, controller: Any, slots: Tensor) -> None:
        """To be called before ``slots``, whole pages, are copied to host memory. Takes effect after the forwards that
        were issued before."""
        if has_storage(controller):
            self._canary.ledger.keep(self._region, slots, int(controller.page_size))

    def loads(self, controller: Any, slots: Tensor, known: Tensor | None) -> None:
        """To be called before ``slots``, whole pages that will be loaded, are forgotten. ``known``: as of `coming`."""
        if has_storage(controller) and (known is None or not bool(known.all())):
            self._canary.ledger.remember(self._region, slots, int(controller.page_size))

    def sought(self, operation: Any, request: Any, loaded: int) -> None:
        """To be called after ``operation`` was queued to load KV for ``request``, behind its prefix on the device;
        ``loaded``: number of tokens added by SGLang to the prefix."""
        # Else some of them were on the device already.
        if loaded == len(operation.device_indices) and _tokens_say_all(request):
            first = progress.prefix_length(request)
            every = np.concatenate((as_array(request.origin_input_ids), as_array(request.output_ids)))
            tokens = torch.from_numpy(every[: first + loaded])
            if len(tokens) == first + loaded:
                self._sought[operation] = Sought(request, first, tokens)

    def coming(self, controller: Any, operation: Any, known: Tensor | None) -> tuple[int, Sought] | None:
        """To be called before ``operation`` is carried out. ``known``: whether each of its slots comes with records,
        bool ``[n]`` on the host; None if none does. Returns the number of first slots without need of a comparison, and
        the request of those after; None if nothing can be compared."""
        sought = self._sought.pop(operation, None)
        if sought is None or not has_storage(controller):
            return None
        begin, end = 0, len(operation.device_indices)
        if known is not None:
            without = known.logical_not().nonzero()[:, 0]
            if not len(without):
                return None
            page = int(controller.page_size)
            begin, end = int(without[0]) // page * page, -(-(int(without[-1]) + 1) // page) * page
        return begin, sought.part(begin, min(end, len(operation.device_indices)))

    def arrival(self, controller: Any, sought: Sought, slots: Tensor) -> Arrival | None:
        """The arrival in ``slots``; None for an unknown prefix."""
        name = str(sought.request.rid)
        if self._requests.request(name) is not sought.request:
            # Nobody has told yet with which adapter, salt or key it is computed.
            return None
        writers = self._requests.writers
        return Arrival(
            self._region,
            slots,
            sought.tokens,
            origin(controller, self._canary.config.ledger_private),
            int(controller.page_size),
            writers.anchor(name),
            writers.id(name),
        )


def has_storage(controller: Any) -> bool:
    """Whether a storage back end is attached; it may come and go while the engine runs."""
    return bool(getattr(controller, "enable_storage", False)) and controller.storage_backend is not None


def origin(controller: Any, private: Sequence[str]) -> Origin:
    """The controller's storage back end, under the name of its class. Others may store there, too (other engines, this
    one's earlier runs), unless ``private`` names it; and the rank's own stores are missing if another rank stores in
    its place."""
    name = type(controller.storage_backend).__name__
    return Origin(name, shared=name not in private or bool(getattr(controller, "backup_skip", False)))


def others_store(cache: Any, private: Sequence[str]) -> str | None:
    """The name of the cache's storage back end, if others may store there, on other hardware that rounds otherwise;
    else None. The same on all ranks."""
    controller = getattr(cache, "cache_controller", None)
    if controller is None or not has_storage(controller):
        return None
    name = type(controller.storage_backend).__name__
    return None if name in private else name


def _tokens_say_all(request: Any) -> bool:
    """Whether the request's KV depends on its tokens and its identity only."""
    media = schedulers.has_media(request) or getattr(request, "mm_inputs", None) is not None
    return not media and not schedulers.embedded(request)
