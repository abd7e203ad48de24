"""`AttentionTurns`: which layer's attention is looked at next, and findings about it."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from canary_core.attention import AttentionRule
from canary_core.recomputer import CachedRequest
from canary_core.records import Kind, Phase
from canary_core.violation import Violation
from canary_core.watchers.recompute.attention import AttentionError, AttentionLook
from canary_core.watchers.recompute.judge import RecomputeHost, RecomputeJudge
from canary_core.watchers.recompute.verification import Verification


class AttentionTurns:
    """One layer for each verified request, in turns. ``rules``: gives those of `Recomputer.attention`, asked for once.

    Counters in `Canary.stats`: ``attention_layers`` with a rule, ``attention_looks`` with a verdict,
    ``attention_differs``, ``attention_unjudged``. Layers without a rule are an ``unjudged`` event for each reason.
    """

    def __init__(
        self, canary: RecomputeHost, judge: RecomputeJudge, rules: Callable[[], Mapping[int, AttentionRule | str]]
    ) -> None:
        self._canary = canary
        self._judge = judge
        self._given = rules
        self._rules: Mapping[int, AttentionRule] | None = None
        self._turn = 0

    def next(self) -> AttentionLook | None:
        """For the layer whose turn it is; None where no layer has a rule."""
        if self._rules is None:
            said = self._given()
            self._rules = {layer: rule for layer, rule in said.items() if isinstance(rule, AttentionRule)}
            self._canary.count("attention_layers", len(self._rules))
            for why in dict.fromkeys(why for why in said.values() if isinstance(why, str)):
                layers = ", ".join(str(layer) for layer, other in said.items() if other == why)
                self._judge.doubt(f"attention of layer {layers} has no reference: {why}")
                self._canary.doubt(f"reference of attention in layer {layers}", why)
        if not self._rules:
            return None
        layer = sorted(self._rules)[self._turn % len(self._rules)]
        self._turn += 1
        return AttentionLook(layer, self._rules[layer], self._judge.rounding())

    def judge(self, cached: CachedRequest, answer: Verification, look: AttentionLook | None) -> Verification:
        """The answer with what was seen; reports a finding."""
        if look is None:
            return answer
        found = look.result()
        if found is None:
            self._canary.count("attention_unjudged")
            self._judge.doubt(f"attention of a layer is not judged: {look.doubt}", layer=look.layer)
            return answer
        self._canary.count("attention_looks")
        if not found.differs:
            return replace(answer, attention=found)
        self._canary.count("attention_differs")
        finding = self._finding(cached, found)
        self._canary.report([finding])
        sentence = finding.explanation if answer.finding is None else f"{answer.finding}; {finding.explanation}"
        return replace(answer, verdict="differs", reason=None, finding=sentence, attention=found)

    def _finding(self, cached: CachedRequest, found: AttentionError) -> Violation:
        regions = {name: self._canary.states[name].region.sources for name in cached.slots}
        of = (name for name, sources in regions.items() if any(source.layer == found.layer for source in sources))
        region = next(of, next(iter(regions)))
        return Violation(
            kind=Kind.ATTENTION,
            region=region,
            phase=Phase.EVENT,
            step=self._canary.forwards,
            slot=int(cached.slots[region][found.position or 0]),
            layer=found.layer,
            position=found.position,
            request=cached.request,
            rule=found.deviation,
            rank=self._canary.config.rank,
            detail=found.detail,
        )
