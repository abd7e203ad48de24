"""`SampledTokens`: what the sampler gave is what the next forward computes, and what the ones after it read."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core import BatchView, Kind, Overlap, Phase

SAMPLED = 8
"""What the sampler gives a request, unless a test says otherwise."""


class Serving:
    """Two requests, ``a`` and ``b``, on a toy engine whose views say nothing of the requests' own tokens."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.guarded = Guarded(ToyEngine(device=device), incident_tokens=True)
        self.canary = self.guarded.canary
        self.canary.sampled.follow()
        self.requests = [self.guarded.submit("a", 3), self.guarded.submit("b", 5)]
        self.forward()

    def view(self, listed: bool = False) -> BatchView:
        view = self.guarded.engine.batch()
        return view if listed else replace(view, expected_tokens=None)

    def forward(self, listed: bool = False) -> None:
        """Computes what the requests have and is not computed. ``listed``: the view has the requests' own tokens."""
        view = self.view(listed)
        self.canary.step.run(lambda: self.guarded.engine.forward(view), lambda: view)

    def sample(self, *tokens: int, without: tuple[int, ...] = ()) -> None:
        """The sampler gives each request one token."""
        self.canary.sampled.give(torch.tensor(tokens, device=self.device), without)

    def append(self, *tokens: int) -> None:
        """What the engine feeds each request."""
        for request, token in zip(self.requests, tokens, strict=True):
            request.tokens.append(token)

    def verify(self) -> None:
        """Samples a token for each request, and computes it with two drafts behind it."""
        self.sample(20, 30)
        self.append(20, 30)
        for request in self.requests:
            request.tokens += [21, 22]
        self.forward()

    def found(self) -> list[tuple[object, ...]]:
        """Kind, request, position, the sampler's token, and the one that was there."""
        self.canary.drain()
        return sorted((v.kind, v.request, v.position, v.token, v.stored_token) for v in self.guarded.violations)

    @property
    def compared(self) -> int:
        self.canary.drain()
        return self.canary.stats()["sampled_tokens"]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_what_was_sampled_and_computed_is_silent(dtype):
    """Each decode's input is compared, and the last tokens that it reads, once they were sampled."""
    serving = Serving()
    for token in range(20, 24):
        serving.canary.sampled.give(torch.tensor([token, token + 40], dtype=dtype))
        serving.append(token, token + 40)
        serving.forward()
    assert serving.found() == []
    assert serving.compared == 2 * (1 + 2 + 3 + 4)


def test_a_forward_of_other_regions_alone_is_not_what_was_sampled_of():
    """As a step of cross-attention between the forward and the sampler."""
    serving = Serving()
    for token in range(20, 23):
        between = replace(serving.view(), tables={})
        serving.canary.step.run(lambda: None, partial(replace, between))
        serving.sample(token, token + 40)
        serving.append(token, token + 40)
        serving.forward()
    assert serving.found() == []
    assert serving.compared == 2 * (1 + 2 + 3)
    serving.sample(30, 40)
    serving.append(30, 41)
    serving.forward()
    assert (Kind.WRITE_INPUT, "b", 8, 40, 41) in serving.found()


def test_exchanged_next_tokens_are_found():
    """Each request is told with its position, what was sampled for it, and what was computed; the slots with the wrong
    tokens are told by the next forward, and once only."""
    serving = Serving()
    serving.sample(20, 30)
    serving.append(30, 20)
    serving.forward()
    inputs = [(Kind.WRITE_INPUT, "a", 3, 20, 30), (Kind.WRITE_INPUT, "b", 5, 30, 20)]
    assert serving.found() == inputs
    first = serving.guarded.violations[0]
    assert (first.region, first.phase, first.stored_value) == ("full", Phase.POST_FORWARD, 20)
    for token in (21, 22):
        serving.sample(token, token)
        serving.append(token, token)
        serving.forward()
    assert serving.found() == [(Kind.TOKEN, "a", 3, 20, 30), (Kind.TOKEN, "b", 5, 30, 20), *inputs]


def test_a_kept_rejected_draft_is_found():
    """A verification accepts one of two drafts, but the length grows by both: the next forward reads the rejected one
    where the sampler's own token belongs, and computes that one behind it."""
    serving = Serving()
    serving.verify()
    serving.canary.sampled.give(torch.tensor([[21, 40, -1], [21, 22, 41]]))
    serving.append(40, 41)
    serving.forward()
    assert serving.found() == [(Kind.TOKEN, "a", 5, 40, 22)]
    assert serving.guarded.violations[0].phase is Phase.POST_FORWARD
    assert serving.guarded.violations[0].slot == serving.requests[0].slots[5]


def test_a_length_that_is_one_short_is_found():
    """The token for position 5 is computed at position 4, for which the sampler gave another one before."""
    serving = Serving()
    for token in (20, 21):
        serving.sample(token, token + 10)
        serving.append(token, token + 10)
        serving.forward()
    serving.sample(22, 32)
    short = serving.requests[0]
    short.cached, short.tokens = short.cached - 1, short.tokens[:-1]
    short.slots.pop()
    serving.append(22, 32)
    serving.forward()
    assert serving.found() == [(Kind.WRITE_INPUT, "a", 4, 21, 22)]


def test_the_engines_own_list_outvotes_the_sampler():
    """A grammar has replaced what was sampled: the request's own list says so, and the forward computes that. It is
    counted, not told. A forward that computes neither is told by the list."""
    serving = Serving()
    serving.sample(20, 30)
    serving.append(99, 30)
    serving.forward(listed=True)
    assert serving.found() == []
    assert serving.canary.stats()["unsure"] == 1


def test_rows_without_a_token_are_left_alone():
    """A prompt that is not at its end goes on with its own tokens, whatever the sampler made of it; and -1 says that
    there is none."""
    serving = Serving()
    serving.sample(20, 30, without=(0,))
    serving.append(77, 30)
    serving.forward()
    serving.sample(-1, 31)
    serving.append(78, 31)
    serving.forward()
    assert serving.found() == []
    assert serving.compared == 1 + 2


def test_a_retracted_request_is_sampled_anew():
    """Its last token was discarded in flight. It is computed from the start, and another token is sampled for the same
    position: what was given first holds no more."""
    serving = Serving()
    serving.sample(20, 30)
    serving.append(20, 30)
    serving.forward()
    serving.sample(21, 31)
    retracted = serving.requests[0]
    retracted.cached, retracted.slots = 0, []
    serving.requests[1].tokens.append(31)
    serving.forward()
    serving.sample(50, 32)
    serving.append(50, 32)
    serving.forward()
    assert serving.found() == []


@pytest.mark.parametrize("chunk", [8, 2])
def test_what_was_sampled_under_way_when_a_request_was_retracted_is_void(chunk):
    """A verification under way gives two tokens more than the retracted request keeps. It is computed again, in chunks
    perhaps, and then drafts are verified at the positions of these tokens: they are no samples."""
    serving = Serving()
    serving.verify()
    retracted, other = serving.requests
    retracted.tokens = retracted.tokens[:3]
    retracted.cached, retracted.slots = 0, []
    serving.canary.sampled.give(torch.tensor([[21, 22, 23], [21, 22, 33]]))
    other.tokens.append(33)
    prompt = retracted.tokens
    while retracted.cached < len(prompt):
        retracted.tokens = prompt[: retracted.cached + chunk]
        serving.forward()
        last = retracted.cached == len(prompt)
        serving.sample(50, other.tokens[-1] + 1, without=() if last else (0,))
        other.tokens.append(other.tokens[-1] + 1)
    retracted.tokens += [50, 61, 62]
    serving.forward()
    assert serving.found() == []
    serving.canary.sampled.give(torch.tensor([[61, 62, 63], [-2, -2, other.tokens[-1] + 1]]))
    retracted.tokens.append(64)
    other.tokens.append(other.tokens[-1] + 1)
    serving.forward()
    assert [found[:3] for found in serving.found()] == [(Kind.WRITE_INPUT, "a", 6)]


def test_a_request_of_the_same_name_starts_without_a_past():
    """Its writer id is another one."""
    serving = Serving()
    serving.sample(20, 30)
    serving.canary.writers.forget("a")
    serving.append(70, 30)
    serving.forward()
    assert serving.found() == []


def test_unchecked_forwards_end_what_is_known():
    """What was sampled in them was not told, so what was sampled before may be out of date: also while the guard is
    paused."""
    serving = Serving()
    serving.sample(20, 30)
    serving.append(20, 30)
    serving.forward()
    serving.sample(21, 31)
    serving.canary.step.run(lambda: None, lambda: None)
    serving.sample(22, 32)
    serving.append(60, 61)
    serving.forward()
    assert serving.found() == []
    assert serving.canary.sampled.left_out == 1
    serving.sample(62, 63)
    serving.canary.step.pause()
    serving.canary.step.run(lambda: None, serving.view)
    serving.canary.step.resume()
    serving.append(64, 65)
    serving.forward()
    assert serving.found() == []


@pytest.mark.parametrize(
    "tokens", [torch.zeros(2), torch.zeros(2, 1, 1, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)]
)
def test_what_fits_no_row_is_counted_and_left(tokens):
    """Floats, another shape, more rows than the forward had."""
    serving = Serving()
    serving.canary.sampled.give(tokens)
    serving.append(1, 2)
    serving.forward()
    assert serving.found() == []
    assert serving.canary.sampled.left_out == 1
    assert serving.canary.enabled


def test_a_larger_batch_keeps_what_was_given():
    """The tables grow between the sampler and the next forward."""
    serving = Serving()
    serving.sample(20, 30)
    serving.canary.states["full"].samples.grow(type("Batch", (), {"rows": 300}))
    serving.canary.states["full"].launches.clear()
    serving.append(21, 30)
    serving.forward()
    assert serving.found() == [(Kind.WRITE_INPUT, "a", 3, 20, 21)]


def test_without_a_plugin_that_follows_the_sampler_nothing_is_kept():
    """No memory, no comparison, and `give` is not an error."""
    guarded = Guarded()
    guarded.submit("a")
    guarded.step()
    guarded.canary.sampled.give(torch.tensor([1]))
    guarded.decode()
    guarded.canary.drain()
    assert guarded.violations == []
    assert guarded.canary.states["full"].samples is None
    assert not guarded.canary.sampled.followed
    assert Guarded(mode="off").canary.sampled.follow() is False


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_overlapped_forwards_are_compared(device):
    """With all of Canary's work beside the forward, where the device has another stream."""
    serving = Serving(device)
    for token, fed in ((20, 20), (21, 22)):
        serving.sample(token, token)
        serving.append(fed, token)
        view = serving.view()
        serving.canary.step.run(
            lambda view=view: serving.guarded.engine.forward(view), lambda view=view: view, overlap=Overlap.ALL
        )
    assert serving.found() == [(Kind.WRITE_INPUT, "a", 4, 21, 22)]
