"""`CompleteBlocks`: blocks of requests completed by forwards, free to be stored from then on."""

from collections.abc import Iterable, Sequence

from canary_adapters.block_events import BlockGroup
from canary_adapters.block_lists import RequestBlocks
from canary_adapters.internal_requests import is_internal
from canary_core import Canary
from canary_core.ops.upload import upload


class CompleteBlocks:
    """Tells the ledger of each complete block of ``groups`` once, right after its forward, but not of internal
    requests, of which nobody stores anything. ``held``: the requests' blocks. ``slack``: tokens of a forward that may
    be rejected later, with the block rewritten and told again."""

    def __init__(self, canary: Canary, groups: Sequence[BlockGroup], held: RequestBlocks, slack: int) -> None:
        self._canary = canary
        self._groups = groups
        self._held = held
        self._slack = slack
        # Tokens of which all complete blocks were told.
        self._told: dict[str, int] = {}

    def begin(self, ended: Iterable[str], again: Iterable[str], computed: Iterable[tuple[str, int]]) -> None:
        """Before a forward: names of ended requests, of requests that begin, or begin again, and of all in the forward
        with the number of tokens before."""
        for name in ended:
            self._told.pop(name, None)
        begun = set(again)
        for name, before in computed:
            if (name in begun or name not in self._told) and not is_internal(name):
                self._told[name] = before

    def end(self, computed: Iterable[tuple[str, int]]) -> None:
        """After the forward: all requests in the forward, each with the number of tokens, without drafted ones."""
        found: list[list[int]] = [[] for _ in self._groups]
        for name, end in computed:
            if name not in self._told:
                continue
            first, self._told[name] = max(self._told[name] - self._slack, 0), end
            for group, blocks in zip(self._groups, found, strict=True):
                if end // group.block > first // group.block:
                    (held,) = self._held.of([name], group.number)
                    blocks += (held or ())[first // group.block : end // group.block]
        for group, blocks in zip(self._groups, found, strict=True):
            if blocks:
                self._canary.ledger.keep_pages(group.region, upload(blocks, self._canary.device), group.block)
