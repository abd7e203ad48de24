"""The book of expected tokens."""

import random

import torch
from canary_transformers.continuous.tokens import TokenBook
from canary_transformers.continuous.upload import upload_lists
from tiny.batching import FakeRequestState

CPU = torch.device("cpu")


def truth(states, width):
    """By hand: each request's tokens, then -1."""
    return [(s.initial_tokens + s.generated_tokens + [-1] * width)[:width] for s in states]


class Book:
    """A `TokenBook` with what its tensors are made from. ``decoded``: how many batches were decodes of the same
    requests."""

    def __init__(self, budget_bytes):
        self.book = TokenBook(CPU, budget_bytes)
        self.decoded = 0
        self._places = []

    def expected(self, states, width):
        """What the book has of a batch."""
        tokens = self.book.decoded(states, width)
        if tokens is None:
            self.book.apply(*upload_lists(self.book.changes(states, width), CPU))
            self._places = self.book.places
        else:
            self.decoded += 1
            self.book.write(*upload_lists([self._places, tokens], CPU))
            self._places = [place + 1 for place in self._places]
        return self.book.tokens


def test_the_book_says_what_requests_say_whoever_comes_and_goes():
    """Random batches of growing requests, names reused, rows evicted; now and then the same ones decode for a while."""
    r = random.Random(1)
    book = Book(budget_bytes=1 << 16)
    running = {}
    for _ in range(300):
        for name in r.sample(range(40), 6):
            if name not in running or r.random() < 0.1:
                running[name] = FakeRequestState(str(name), [r.randrange(500) for _ in range(r.randrange(1, 30))])
        batch = r.sample(sorted(running), r.randrange(1, min(len(running), 12) + 1))
        states = [running[name] for name in batch]
        for more in (2, *[1] * r.choice([0, 0, 5])):
            for s in states:
                s.generated_tokens += [r.randrange(500) for _ in range(r.randrange(more) if more > 1 else 1)]
            width = max(len(s.initial_tokens) + len(s.generated_tokens) for s in states)
            found = book.expected(states, width)
            assert found.tolist() == truth(states, found.shape[1])
            assert found.shape[1] >= width
    assert book.decoded > 100


def test_the_book_keeps_to_its_budget():
    """Positions beyond what the budget can hold are unknown, not wrong."""
    book = Book(budget_bytes=4 * 64)
    states = [FakeRequestState("a", range(100)), FakeRequestState("b", range(100, 110))]
    for _ in range(3):
        found = book.expected(states, 100)
        assert found.shape[1] == 16
        assert found.tolist() == truth(states, 16)
        for s in states:
            s.generated_tokens.append(7)
