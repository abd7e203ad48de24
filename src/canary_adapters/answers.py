"""`AnswerCheck`: whether the tokens in an engine's own lists of answers are the sampled tokens.

A scheduler keeps the tokens of each request: for the answer, the hashes of the prefix cache, and the prefill after a
preemption. A token dropped, doubled or replaced there leaves no trace in the forwards, whose tokens are the runner's.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from canary_core import Canary, Event, Kind, Phase, Violation
from canary_core.ops.upload import upload
from canary_core.records import SAMPLE_TOKENS

ANSWER_TOKENS = SAMPLE_TOKENS
"""Tokens of a request known of the sampler: the last. Earlier tokens need not be given."""

MOST_WAITING = 8
"""Most lists with sampled tokens on their way to the host; older lists are given up."""

MOST_HELD = 1 << 16
"""Most tokens in lists that wait for a forward; later lists are given up."""

MOST_TOLD = 4096
"""Requests remembered as told."""

BLIND_TOKENS, BLIND_STEPS = 1024, 64
"""So many tokens in a row without a known sample, or forwards without lists, show that nothing is compared."""


@dataclass(slots=True)
class AnswerParts:
    """Ends of requests' answers, in the lists of an engine. Request ``i`` has ``counts[i]`` of ``tokens``, the first
    at the position ``firsts[i]`` of prompt and answer."""

    requests: list[str] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, request: str, first: int, tokens: list[int]) -> None:
        """One request's part."""
        self.requests.append(request)
        self.firsts.append(first)
        self.counts.append(len(tokens))
        self.tokens += tokens

    def join(self, later: "AnswerParts") -> None:
        """Appends all of ``later``."""
        self.requests += later.requests
        self.firsts += later.firsts
        self.counts += later.counts
        self.tokens += later.tokens


class AnswerCheck:
    """Compares lists of answers with what `Canary.sampled` has for the same requests and positions.

    The comparison is by position, since engines discard samples: of rejected drafts, prompts computed in parts,
    requests preempted or ended meanwhile. Tokens without a known sample are counted as ``answers_unknown``, compared
    tokens as ``answered_tokens``. The first difference of a request is a ``token`` finding, of the phase ``event``.
    The host waits for nothing. ``writer``: the writer id of a request, None if unknown.
    """

    def __init__(self, canary: Canary, writer: Callable[[str], int | None]) -> None:
        self._canary = canary
        self._writer = writer
        self._held: tuple[AnswerParts, list[int], int] | None = None
        self._waiting: deque[_Look] = deque()
        self._told: OrderedDict[int, None] = OrderedDict()
        self._unknown = self._without = 0
        self._blind = False

    def take(self, parts: AnswerParts | None) -> None:
        """Before each forward, on its stream, and before it is checked. ``parts``: lists as of now, None where the
        engine gave no lists. Samples of the last tokens are known after this forward's check, and looked up then."""
        if self._canary.step.paused:
            self._held = None
            return
        held = self._held
        if held is not None and self._canary.forwards > held[2]:
            self._held = None
            self._look_up(held[0], held[1])
        while self._waiting and self._compared(self._waiting[0]):
            self._waiting.popleft()
        self._without = 0 if parts is not None else self._without + 1
        if self._without == BLIND_STEPS:
            self._unchecked(f"{BLIND_STEPS} forwards came without the engine's lists")
        if parts is not None and parts.tokens:
            # A name may be another request's when the lists are looked up.
            ids = [-1 if (known := self._writer(name)) is None else known for name in parts.requests]
            if self._held is None:
                self._held = AnswerParts(), [], 0
            held_parts, held_ids, _ = self._held
            if len(held_parts.tokens) > MOST_HELD:
                self._canary.count("answers_unknown", len(parts.tokens))
                return
            held_parts.join(parts)
            self._held = held_parts, held_ids + ids, self._canary.forwards

    def _look_up(self, parts: AnswerParts, ids: list[int]) -> None:
        look = _Look(parts, ids)
        tokens = self._canary.sampled.at(look.writers, look.positions)
        if tokens is None:
            self._unchecked("nothing is known of what is sampled")
            return
        look.sampled = tokens
        self._waiting.append(look)
        if len(self._waiting) > MOST_WAITING:
            self._canary.count("answers_unknown", len(self._waiting.popleft().parts.tokens))

    def _compared(self, look: "_Look") -> bool:
        """Compares ``look``; False if the sampled tokens are still on their way."""
        sampled = look.sampled()
        if sampled is None:
            return False
        inner = sampled[look.inner]
        known = int((inner >= 0).sum())
        self._canary.count("answered_tokens", known)
        self._canary.count("answers_unknown", len(inner) - known)
        self._unknown = 0 if known else self._unknown + len(inner)
        if self._unknown >= BLIND_TOKENS:
            self._unchecked(f"of {self._unknown} tokens in a row it is not known what was sampled")
        wrong = (inner >= 0) & (inner != look.listed)
        if bool(wrong.any()):
            self._report(look, wrong, sampled)
        return True

    def _report(self, look: "_Look", wrong: Tensor, sampled: Tensor) -> None:
        found, end = [], 0
        for row, (count, writer) in enumerate(zip(look.parts.counts, look.ids, strict=True)):
            begin, end = end, end + count
            places = wrong[begin:end].nonzero()
            if not len(places) or writer in self._told:
                continue
            self._told[writer] = None
            if len(self._told) > MOST_TOLD:
                self._told.popitem(last=False)
            at = int(places[0])
            # The sampled tokens of a row have one more at each end.
            around = sampled[begin + 2 * row : end + 2 * row + 2].tolist()
            listed = look.parts.tokens[begin:end]
            found.append(
                Violation(
                    Kind.TOKEN,
                    next(iter(self._canary.regions)),
                    Phase.EVENT,
                    self._canary.forwards,
                    position=look.parts.firsts[row] + at,
                    token=listed[at],
                    stored_token=around[at + 1],
                    request=look.parts.requests[row],
                    rank=self._canary.config.rank,
                    detail=_nature(listed[at:], around[at:]),
                )
            )
        self._canary.report(found)

    def _unchecked(self, reason: str) -> None:
        if not self._blind:
            self._blind = True
            self._canary.tell(Event("answers_unchecked", "warning", {"reason": reason}))


class _Look:
    """A look-up of samples: of each request the positions in its list, and one more at each end."""

    def __init__(self, parts: AnswerParts, ids: list[int]) -> None:
        self.parts = parts
        self.ids = ids
        host = torch.device("cpu")
        first, counts, writers = upload(parts.firsts, host), upload(parts.counts, host), upload(ids, host)
        lengths = counts + 2
        starts = lengths.cumsum(0) - lengths
        self.positions = torch.arange(int(lengths.sum()), device="cpu") + (first - 1 - starts).repeat_interleave(
            lengths
        )
        self.writers = writers.repeat_interleave(lengths)
        self.inner = torch.ones(len(self.positions), dtype=torch.bool, device="cpu")
        self.inner[starts] = self.inner[starts + lengths - 1] = False
        self.listed = upload(parts.tokens, host)
        self.sampled: Callable[[], Tensor | None] = lambda: None


def _nature(listed: list[int], around: list[int]) -> str | None:
    """How ``listed``, whose first token is wrong, differs from what was sampled. ``around``: sampled tokens from one
    position before to one behind, -1 where unknown."""
    since = f", and has gone on for {len(listed) - 1} more since" if len(listed) > 1 else ""
    natures = (
        ("as if a token had been dropped", listed, around[2:]),
        ("as if a token had come twice", listed, around),
        ("alone, with the right ones behind it", listed[1:], around[2:]),
    )
    for nature, own, given in natures:
        both = [(one, other) for one, other in zip(own, given, strict=False) if other >= 0]
        if both and all(one == other for one, other in both):
            return f"{nature}{since}"
    return since[2:] or None
