"""`Held`: complete blocks of each request, by the scheduler's own messages."""

from collections.abc import Iterator, Sequence
from typing import Any

from canary_adapters import RequestBlocks


class Held:
    """Follows the scheduler's output; ``blocks`` are those of its requests. ``slack``: tokens of a forward that may be
    rejected later, so that their block is rewritten: it is reported again, then."""

    def __init__(self, blocks: RequestBlocks, slack: int) -> None:
        self._blocks = blocks
        self._slack = slack
        # Tokens of which all complete blocks were given.
        self._told: dict[str, int] = {}

    def notice(self, output: Any) -> None:
        """Before the forward of ``output``."""
        for name in output.finished_req_ids:
            self._told.pop(name, None)
        again = {new.req_id for new in output.scheduled_new_reqs}
        again.update(getattr(output.scheduled_cached_reqs, "resumed_req_ids", ()))
        for name, computed in computed_before(output):
            if name in again or name not in self._told:
                self._told[name] = computed

    def computed(self, output: Any) -> Iterator[tuple[str, int, int]]:
        """After the forward of ``output``: name of each computed request, and the first and last token of newly
        complete blocks."""
        drafts, before = output.scheduled_spec_decode_tokens, dict(computed_before(output))
        for name, scheduled in output.num_scheduled_tokens.items():
            if name in self._told and name in before:
                end = before[name] + scheduled - len(drafts.get(name, ()))
                first, self._told[name] = max(self._told[name] - self._slack, 0), end
                if end > first:
                    yield name, first, end

    def blocks(self, name: str, group: int, first: int, end: int) -> Sequence[int]:
        """Numbers ``first`` to ``end`` of the request's blocks in ``group``."""
        (held,) = self._blocks.of([name], group)
        return (held or ())[first:end]


def computed_before(output: Any) -> Sequence[tuple[str, int]]:
    """The requests in the forward of ``output``, and each one's number of tokens before."""
    cached = output.scheduled_cached_reqs
    new = [(r.req_id, int(r.num_computed_tokens)) for r in output.scheduled_new_reqs]
    return [*new, *zip(cached.req_ids, map(int, cached.num_computed_tokens), strict=True)]
