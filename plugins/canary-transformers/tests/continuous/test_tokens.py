"""The book of expected tokens."""

import random

import torch
from canary_transformers.continuous.tokens import TokenBook
from tiny.batching import FakeRequestState

CPU = torch.device("cpu")


def truth(states, width):
    """By hand: each request's tokens, then -1."""
    return [(s.initial_tokens + s.generated_tokens + [-1] * width)[:width] for s in states]


def test_the_book_says_what_requests_say_whoever_comes_and_goes():
    """Random batches of growing requests, names reused, rows evicted."""
    r = random.Random(1)
    book = TokenBook(CPU, budget_bytes=1 << 16)
    running = {}
    for _ in range(300):
        for name in r.sample(range(40), 6):
            if name not in running or r.random() < 0.1:
                running[name] = FakeRequestState(str(name), [r.randrange(500) for _ in range(r.randrange(1, 30))])
        batch = r.sample(sorted(running), r.randrange(1, min(len(running), 12) + 1))
        states = [running[name] for name in batch]
        for s in states:
            s.generated_tokens += [r.randrange(500) for _ in range(r.randrange(0, 3))]
        width = max(len(s.initial_tokens) + len(s.generated_tokens) for s in states) + r.randrange(2)
        assert book.expected(states, width).tolist() == truth(states, width)


def test_the_book_keeps_to_its_budget():
    """Positions beyond what the budget can hold are unknown, not wrong."""
    book = TokenBook(CPU, budget_bytes=4 * 64)
    states = [FakeRequestState("a", range(100)), FakeRequestState("b", range(100, 110))]
    found = book.expected(states, 100)
    assert found.shape[1] == 16
    assert found.tolist() == truth(states, 16)
