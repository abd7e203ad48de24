"""`Held`: the blocks of each request, by the scheduler's own messages, and which of them are complete."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Blocks:
    """``of``: the blocks of each group. ``told``: tokens of which all complete blocks were given."""

    of: list[list[int]]
    told: int


class Held:
    """Follows the scheduler's output. ``slack``: tokens of a forward that may be rejected later on, so that their block
    is written again: it is given again, then."""

    def __init__(self, slack: int) -> None:
        self._slack = slack
        self._requests: dict[str, _Blocks] = {}

    def notice(self, output: Any) -> None:
        """Before the forward of ``output``."""
        for name in output.finished_req_ids:
            self._requests.pop(name, None)
        for new in output.scheduled_new_reqs:
            self._requests[new.req_id] = _Blocks([list(ids) for ids in new.block_ids], int(new.num_computed_tokens))
        cached = output.scheduled_cached_reqs
        resumed = getattr(cached, "resumed_req_ids", ())
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            held = self._requests.get(name)
            if name in resumed or held is None:
                self._requests[name] = _Blocks([list(ids) for ids in blocks or ()], int(computed))
            elif blocks is not None:
                for own, more in zip(held.of, blocks, strict=True):
                    own += more

    def computed(self, output: Any) -> Iterator[tuple[str, int, int]]:
        """After the forward of ``output``: of each request that it computed, the name, and from which to which token
        complete blocks are new."""
        drafts = output.scheduled_spec_decode_tokens
        ends = {new.req_id: int(new.num_computed_tokens) for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        ends |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, scheduled in output.num_scheduled_tokens.items():
            held = self._requests.get(name)
            if held is None or name not in ends:
                continue
            end = ends[name] + scheduled - len(drafts.get(name, ()))
            first, held.told = max(held.told - self._slack, 0), end
            if end > first:
                yield name, first, end

    def blocks(self, name: str, group: int, first: int, end: int) -> Sequence[int]:
        """Numbers ``first`` to ``end`` of the request's blocks in ``group``."""
        held = self._requests[name].of
        return held[group][first:end] if group < len(held) else ()
