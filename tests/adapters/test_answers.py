"""`AnswerCheck`: tokens in an engine's own lists of answers, against the sampled ones."""

from dataclasses import replace

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine

import canary_adapters.answers
from canary_adapters import AnswerCheck, AnswerParts
from canary_core import Kind, Phase

PROMPTS = {"a": 3, "b": 5}
SAMPLED = {"a": (20, 21, 22, 23, 24, 25), "b": (30, 31, 32, 33, 34, 35)}


class Serving:
    """Two requests, ``a`` and ``b``, that have got all of `SAMPLED` but the last, and what is told of their lists."""

    def __init__(self, follow: bool = True) -> None:
        self.guarded = Guarded(ToyEngine(), incident_tokens=True)
        self.canary = self.guarded.canary
        if follow:
            self.canary.sampled.follow()
        self.answers = AnswerCheck(self.canary, self.canary.writers.known)
        self.requests = [self.guarded.submit(name, length) for name, length in PROMPTS.items()]
        self.forward()
        for tokens in list(zip(*SAMPLED.values(), strict=True))[:-1]:
            self.decode(*tokens)

    def forward(self, parts: AnswerParts | None = None) -> None:
        self.answers.take(parts)
        view = replace(self.guarded.engine.batch(), expected_tokens=None)
        self.canary.step.run(lambda: self.guarded.engine.forward(view), lambda: view)

    def decode(self, *tokens: int, parts: AnswerParts | None = None) -> None:
        self.canary.sampled.give(torch.tensor(tokens))
        for request, token in zip(self.requests, tokens, strict=True):
            request.tokens.append(token)
        self.forward(parts)

    def hand_in(self, forwards: int = 3, skip: int = 0, **lists: list[int]) -> None:
        """The engine's lists come with the next forward, without their first ``skip`` tokens; some forwards follow."""
        parts = AnswerParts()
        for name, tokens in lists.items():
            parts.add(name, PROMPTS.get(name, 1) + skip, tokens[skip:])
        for number in range(forwards):
            self.decode(40 + number, 50 + number, parts=parts if number == 0 else None)

    def found(self) -> list[tuple[object, ...]]:
        self.canary.drain()
        told = [v for v in self.guarded.violations if v.kind is Kind.TOKEN]
        assert all(v.phase is Phase.EVENT for v in told)
        return [(v.request, v.position, v.token, v.stored_token, v.detail) for v in told]

    def count(self, name: str) -> int:
        return self.canary.stats().get(name, 0)


def test_lists_of_sampled_tokens_are_silent():
    """Every token is compared, the one sampled last too."""
    serving = Serving()
    serving.hand_in(a=[20, 21, 22, 23, 24], b=[30, 31, 32, 33, 34])
    assert serving.found() == []
    assert (serving.count("answered_tokens"), serving.count("answers_unknown")) == (10, 0)


@pytest.mark.parametrize(
    ("listed", "position", "token", "sampled", "detail"),
    [
        ([20, 22, 23, 24], 4, 22, 21, "as if a token had been dropped, and has gone on for 2 more since"),
        ([20, 21, 21, 22, 23], 5, 21, 22, "as if a token had come twice, and has gone on for 2 more since"),
        ([20, 99, 22, 23], 4, 99, 21, "alone, with the right ones behind it, and has gone on for 2 more since"),
        ([20, 21, 22, 99], 6, 99, 23, None),
        ([20, 88, 99], 4, 88, 21, "and has gone on for 1 more since"),
    ],
)
def test_the_first_wrong_token_of_a_list_is_told_once(listed, position, token, sampled, detail):
    """With what it looks like. The other request is not told, nor is the same one again."""
    serving = Serving()
    serving.hand_in(a=listed, b=[30, 31, 32])
    serving.hand_in(a=listed, b=[30, 31, 32])
    assert serving.found() == [("a", position, token, sampled, detail)]
    sentence = next(v for v in serving.guarded.violations if v.kind is Kind.TOKEN).explanation
    assert f"the sampler gave a token {sampled} for position {position}" in sentence
    assert f"own list has token {token} there" in sentence


def test_what_is_not_known_is_not_judged():
    """Tokens of an unknown request, of one whose name another has by now, of a time before the sampler was followed, or
    further back than is remembered; each is counted."""
    serving = Serving()
    serving.hand_in(stranger=[1, 2, 3])
    assert (serving.found(), serving.count("answers_unknown")) == ([], 3)
    serving.canary.writers.forget("a")
    serving.hand_in(a=[1, 2, 3])
    assert (serving.found(), serving.count("answers_unknown")) == ([], 6)
    serving.canary.sampled.forget()
    serving.hand_in(b=[1, 2, 3])
    assert (serving.found(), serving.count("answers_unknown")) == ([], 9)
    assert serving.count("answered_tokens") == 0


def test_lists_wait_for_the_forward_that_takes_the_samples_over(monkeypatch):
    """Without a forward they are not looked up, nor forgotten, unless there are very many; nor are they where the host
    is not told what was sampled. What is given up is counted."""
    serving = Serving()
    parts = AnswerParts()
    parts.add("a", PROMPTS["a"], [99])
    serving.answers.take(parts)
    parts = AnswerParts()
    parts.add("b", PROMPTS["b"], [30])
    serving.answers.take(parts)
    monkeypatch.setattr(canary_adapters.answers, "MOST_HELD", 1)
    serving.answers.take(parts)
    assert serving.count("answers_unknown") == 1
    serving.decode(40, 50)
    serving.decode(41, 51)
    assert [one[0] for one in serving.found()] == ["a"]
    assert serving.count("answered_tokens") == 2
    monkeypatch.setattr(serving.canary.sampled, "of", lambda *_: lambda: None)
    monkeypatch.setattr(canary_adapters.answers, "MOST_WAITING", 2)
    for number in range(6):
        serving.decode(60 + number, 70 + number, parts=parts)
    assert serving.count("answers_unknown") > 1


def test_that_nothing_is_compared_is_told(monkeypatch):
    """Once each: no sampler is followed, all samples are unknown, or no lists come. Not of a guard that is paused."""
    monkeypatch.setattr(canary_adapters.answers, "BLIND_TOKENS", 6)

    def told(serving: Serving) -> list[object]:
        return [e.fields["reason"] for e in serving.guarded.findings.events if e.name == "answers_unchecked"]

    serving = Serving(follow=False)
    serving.hand_in(a=[20, 21])
    serving.hand_in(a=[20, 21])
    assert told(serving) == ["nothing is known of what is sampled"]
    serving = Serving()
    serving.hand_in(stranger=[1, 2, 3])
    serving.hand_in(a=[20])
    serving.hand_in(stranger=[1, 2, 3])
    assert told(serving) == []
    serving.hand_in(stranger=[1, 2, 3])
    assert told(serving) == ["of 6 tokens in a row it is not known what was sampled"]
    monkeypatch.setattr(canary_adapters.answers, "BLIND_STEPS", 20)
    serving = Serving()
    for number in range(15):
        serving.decode(60 + number, 70 + number)
    assert told(serving) == ["20 forwards came without the engine's lists"]
