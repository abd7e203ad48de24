"""`Answer`: one call of `generate()`, and the number of tokens computed by its answer's account."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import Tensor

from canary_transformers.generate import caches
from canary_transformers.generate.guarded_cache import GuardedCache


@dataclass(slots=True, eq=False)
class Answer:
    """``prompt``: given tokens of a row. ``continues``: a cache was given, too, so that some of them may have been
    computed before. ``placed``: and positions. ``seen``: tokens of forwards seen by the hook so far. ``halves``: the
    caches of these forwards with their guards, kept until the answer was judged. ``number``: none has two."""

    prompt: int
    continues: bool
    placed: bool = False
    seen: int = 0
    halves: list[tuple[Any, GuardedCache]] = field(default_factory=list)
    number: int = field(default_factory=count(1).__next__)

    def meets(self, half: Any, guarded: GuardedCache) -> bool:
        """Keeps a cache; whether it is the first forward with it."""
        if any(guarded is known for _, known in self.halves):
            return False
        self.halves.append((half, guarded))
        return True

    @classmethod
    def begin(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Answer":
        """The answer for a call with these arguments."""
        given = [kwargs.get(name) for name in ("inputs", "input_ids")]
        tokens = next((g for g in [*given, *args[:1]] if isinstance(g, Tensor) and g.dim() == 2), None)
        placed = kwargs.get("position_ids") is not None
        return cls(0 if tokens is None else tokens.shape[1], caches.among(kwargs.values()) is not None, placed)

    def tokens(self, output: Any) -> int:
        """Tokens computed for ``output``: of each row all but the last one, at least. Or the number seen by the hook if
        larger, since beams, drafts and chunks are not all in the answer; also for a failed call."""
        sequences = getattr(output, "sequences", output)
        if not isinstance(sequences, Tensor) or sequences.dim() != 2:
            return self.seen
        rows, length = sequences.shape
        known = self.prompt if self.continues else 0
        return max(self.seen, rows * max(length - known - 1, 0))
