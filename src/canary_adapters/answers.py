"""`AnswerCheck`: whether the tokens in an engine's own lists of answers are the sampled tokens.

A scheduler keeps the tokens of each request: for the answer, the hashes of the prefix cache, and the prefill after a
preemption. A token dropped, doubled or replaced there leaves no trace in the forwards, whose tokens are the runner's.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import add

from canary_core import Canary, Event, Kind, Phase, Violation
from canary_core.records import SAMPLE_POSITION_BITS, SAMPLE_TOKEN_BITS, SAMPLE_TOKENS, SAMPLE_WRITER_BITS

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

_STEP = 1 << SAMPLE_TOKEN_BITS
"""From a sample to the one of the next position, with the same token."""


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
        self._waiting: deque[tuple[AnswerParts, list[int], Callable[[], list[list[int]] | None]]] = deque()
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
        while self._waiting and self._compared(*self._waiting[0]):
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
        rows = self._canary.sampled.of(ids)
        if rows is None:
            self._unchecked("nothing is known of what is sampled")
            return
        self._waiting.append((parts, ids, rows))
        if len(self._waiting) > MOST_WAITING:
            self._canary.count("answers_unknown", len(self._waiting.popleft()[0].tokens))

    def _compared(self, parts: AnswerParts, ids: list[int], rows: Callable[[], list[list[int]] | None]) -> bool:
        """Compares ``parts``; False if what was sampled is still on its way."""
        entries = rows()
        if entries is None:
            return False
        found, known, end = [], 0, 0
        for row, first, count, writer, own in zip(
            range(len(ids)), parts.firsts, parts.counts, ids, entries, strict=True
        ):
            listed = parts.tokens[end : end + count]
            end += count
            if _are_sampled(own, writer, first, listed):
                known += count
                continue
            # One more at each end.
            around = _sampled(own, writer, range(first - 1, first + count + 1))
            known += sum(token >= 0 for token in around[1:-1])
            wrong = (i for i, token in enumerate(listed) if 0 <= around[i + 1] != token)
            if (at := next(wrong, None)) is not None and self._first(writer):
                found.append(self._violation(parts.requests[row], first + at, listed[at:], around[at:]))
        self._canary.count("answered_tokens", known)
        self._canary.count("answers_unknown", end - known)
        self._unknown = 0 if known else self._unknown + end
        if self._unknown >= BLIND_TOKENS:
            self._unchecked(f"of {self._unknown} tokens in a row it is not known what was sampled")
        if found:
            self._canary.report(found)
        return True

    def _first(self, writer: int) -> bool:
        """Whether nothing was told of ``writer`` so far."""
        if writer in self._told:
            return False
        self._told[writer] = None
        if len(self._told) > MOST_TOLD:
            self._told.popitem(last=False)
        return True

    def _violation(self, request: str, position: int, listed: list[int], around: list[int]) -> Violation:
        return Violation(
            Kind.TOKEN,
            next(iter(self._canary.regions)),
            Phase.EVENT,
            self._canary.forwards,
            position=position,
            token=listed[0],
            stored_token=around[1],
            request=request,
            rank=self._canary.config.rank,
            detail=_nature(listed, around),
        )

    def _unchecked(self, reason: str) -> None:
        if not self._blind:
            self._blind = True
            self._canary.tell(Event("answers_unchecked", "warning", {"reason": reason}))


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


def _are_sampled(entries: list[int], writer: int, first: int, tokens: list[int]) -> bool:
    """Whether ``tokens``, `SAMPLE_TOKENS` at most, are those sampled for ``writer`` from the position ``first`` on.
    ``entries``: a row of `Samples.of`. False also where that is not known."""
    start, end = first % SAMPLE_TOKENS, first % SAMPLE_TOKENS + len(tokens)
    own = entries[start:end] if end <= SAMPLE_TOKENS else entries[start:] + entries[: end - SAMPLE_TOKENS]
    word = _word(writer, first)
    # No token is looked at in Python: many requests are compared on the engine's thread.
    return own == list(map(add, range(word, word + (len(tokens) << SAMPLE_TOKEN_BITS), _STEP), tokens)) and writer >= 0


def _sampled(entries: list[int], writer: int, positions: range) -> list[int]:
    """The tokens sampled for ``writer`` at ``positions``, -1 where unknown. ``entries``: a row of `Samples.of`."""
    found = []
    for position in positions:
        token = entries[position % SAMPLE_TOKENS] - _word(writer, position)
        fits = writer >= 0 and 0 < position < 1 << SAMPLE_POSITION_BITS and 0 <= token < 1 << SAMPLE_TOKEN_BITS
        found.append(token if fits else -1)
    return found


def _word(writer: int, position: int) -> int:
    """The sample of token 0."""
    return (writer % (1 << SAMPLE_WRITER_BITS) << SAMPLE_POSITION_BITS | position) << SAMPLE_TOKEN_BITS
