"""`Verification`: the answer for one request, with the figures of each layer."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol, get_args

from canary_core.watchers.recompute.attention import AttentionError
from canary_core.watchers.recompute.compared_bytes import ComparedBytes

Reason = Literal["few_tokens", "noise_unknown", "no_numbers", "no_memory", "refused", "failed"]
"""Sorts of missing verdicts, as they are counted. refused: the engine's plugin says why."""
OUTCOMES: tuple[str, ...] = ("same", "differs", "gone", *get_args(Reason))
"""All that a recompute can come to."""


@dataclass(frozen=True, slots=True)
class LayerError:
    """Relative L2 errors of a source in a region. median: of all compared tokens; worst: the largest median of
    `WINDOW_TOKENS` tokens in a row; bound: the largest such median that counts as numerical noise, None before one is
    learnt. quarter: the largest error that a quarter of so many tokens have at least; quarter_bound: the largest one
    of noise, None where only medians are judged. Of a recurrent state: rows of numbers in the place of
    tokens."""

    region: str
    source: str
    layer: int
    tokens: int
    median: float
    worst: float
    bound: float | None
    quarter: float = 0.0
    quarter_bound: float | None = None

    @property
    def differs(self) -> bool:
        """Whether the error is none of the engine's own noise."""
        return (self.bound is not None and self.worst > self.bound) or self.by_quarter

    @property
    def by_quarter(self) -> bool:
        """Whether the error of a quarter of the tokens is above the bound, and no median."""
        if self.bound is None or self.quarter_bound is None or self.worst > self.bound:
            return False
        return self.quarter > self.quarter_bound


@dataclass(frozen=True, slots=True)
class Verification:
    """``tokens`` of a request in the cache against the same tokens computed again. reason: of a verdict ``unjudged`` or
    ``gone``. finding: of a verdict ``differs``, in a sentence. uncompared: region and source of what has no numbers to
    compare, or so much noise that nearly anything hides. attention: of the layer whose turn it was, against plain
    torch. parked: whether the request has ended, and only a prefix is in the cache; ``gone`` if too little is left.
    bytes: a comparison with the fingerprints, None without one. With changed bytes the verdict is ``differs``."""

    request: str
    tokens: int
    verdict: Literal["same", "differs", "unjudged", "gone"]
    reason: str | None = None
    finding: str | None = None
    layers: Sequence[LayerError] = ()
    uncompared: Sequence[str] = ()
    attention: AttentionError | None = None
    parked: bool = False
    bytes: ComparedBytes | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; None in the place of an error that is not finite."""
        finite = [
            replace(one, median=_finite(one.median), worst=_finite(one.worst), quarter=_finite(one.quarter))
            for one in self.layers
        ]
        seen = self.attention
        if seen is not None:
            seen = replace(seen, median=_finite(seen.median), worst=_finite(seen.worst))
        return asdict(replace(self, layers=finite, attention=seen))

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Verification":
        """From `to_dict`; other keys are passed over."""
        fields = {name: plain[name] for name in cls.__slots__ if name != "bytes"}
        layers = [LayerError(**{**one, **_endless(one)}) for one in plain["layers"]]
        seen = plain["attention"]
        attention = None if seen is None else AttentionError(**{**seen, **_endless(seen)})
        # A process with an earlier release says nothing of them.
        found = plain.get("bytes")
        compared = None if found is None else ComparedBytes(**found)
        return cls(**{**fields, "layers": layers, "attention": attention, "bytes": compared})

    def table(self) -> str:
        """Lines of text for people: the verdict, then one line for each source."""
        head = f"{'prefix of ' * self.parked}{self.request}: {self.verdict}, {self.tokens} tokens"
        lines = [f"{head} ({self.reason})" if self.reason else head, *([self.finding] if self.finding else [])]
        if self.bytes is not None or self.verdict in ("same", "differs"):
            lines.append(f"  bytes: {'not compared' if self.bytes is None else self.bytes.sentence}")
        for one in self.layers:
            bound = "" if one.bound is None else f", noise up to {one.bound:.2g}"
            if one.by_quarter:
                bound += f"; a quarter {one.quarter:.2g} and more, noise up to {one.quarter_bound:.2g}"
            mark = "  <-- differs" if one.differs else ""
            lines.append(f"  {one.region} {one.source}: median {one.median:.2g}, worst {one.worst:.2g}{bound}{mark}")
        seen = self.attention
        if seen is not None:
            mark = "  <-- differs" if seen.differs else ""
            figures = f"median {seen.median:.2g}, worst {seen.worst:.2g}, rounding up to {seen.bound:.2g}"
            lines.append(f"  attention of layer {seen.layer}, head {seen.head}: {figures}{mark}")
        if self.uncompared:
            lines.append(f"  not compared: {', '.join(self.uncompared)}")
        return "\n".join(lines)


class Verifier(Protocol):
    """Has requests of one Canary computed again: `Canary.verifier`."""

    def ask(self, request: str | None = None, parked: bool = False) -> "Future[list[Verification]]":
        """Asks for the verification of one request, or (None) of all that run, and does not wait. For any thread. The
        result may be a `CanaryError`. parked: of prefixes of ended requests in the prefix cache."""


def _endless(plain: Mapping[str, Any]) -> dict[str, float]:
    return {name: float("inf") for name in ("median", "worst", "quarter") if plain.get(name, 0.0) is None}


def _finite(error: float) -> Any:
    return error if abs(error) < float("inf") else None
