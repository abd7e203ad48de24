"""The toy engine of examples/canary-toy by itself, without Canary: answers depend on the KV and on nothing else."""

import pytest
import torch
from canary_toy.toy_engine import CHUNK, PAGE, Engine, Request

PROMPT = [7, 3, 9, 200, 31, 5, 77, 12, 90, 41, 17, 66, 2, 8, 101, 54, 23, 19, 88, 4, 250]


def serve(engine: Engine, *requests: tuple[str, list[int], int]) -> list[list[int]]:
    """The answers, once all requests are through."""
    submitted = [engine.submit(*request) for request in requests]
    while engine.step():
        pass
    return [request.answer for request in submitted]


def started(engine: Engine, tokens: int = 3, new_tokens: int = 10) -> Request:
    """A request that has answered ``tokens`` tokens so far."""
    request = engine.submit("a", PROMPT, new_tokens)
    while len(request.answer) < tokens:
        assert engine.step()
    return request


def expected(new_tokens: int = 10) -> list[int]:
    """The answer to `PROMPT`, computed alone on an engine of its own."""
    return serve(Engine(), ("alone", PROMPT, new_tokens))[0]


def test_a_prompt_is_prefilled_in_chunks_and_answered_token_by_token():
    """A forward computes at most `CHUNK` tokens of prompts; the last chunk brings the first token of the answer."""
    engine = Engine()
    request = engine.submit("a", PROMPT, 3)
    computed = []
    while engine.step():
        computed.append(request.computed or len(request.tokens) - 1)
    assert computed == [CHUNK, len(PROMPT), len(PROMPT) + 1, len(PROMPT) + 2]
    assert len(request.answer) == 3


def test_the_cache_changes_no_answer():
    """With a hit on the prefix cache, beside other requests and in a small pool the answer is the same."""
    beside = [(f"r{i}", [*PROMPT[:10], i, i + 1], 6) for i in range(6)]
    for engine in (Engine(), Engine(pages=14)):
        assert serve(engine, ("a", PROMPT, 10), *beside)[0] == expected()
        assert serve(engine, ("b", PROMPT, 10)) == [expected()]


def test_a_hit_shares_the_pages_and_computes_the_rest():
    """The second request of a prompt takes the full pages of the first one, all but the page of its last token."""
    engine = Engine()
    serve(engine, ("a", PROMPT, 4))
    pages = engine.cache.match(PROMPT)
    assert len(pages) == len(PROMPT) // PAGE
    request = engine.submit("b", PROMPT, 4)
    engine.step()
    assert request.pages[: len(pages)] == pages
    assert not engine.cache.parked.keys() & set(pages)


def test_requests_of_one_forward_do_not_hit_each_other():
    """A page is published once it was computed, so two equal prompts of one forward have pages of their own."""
    engine = Engine()
    one, two = engine.submit("a", PROMPT[:8], 4), engine.submit("b", PROMPT[:8], 4)
    engine.step()
    assert not set(one.pages) & set(two.pages)


def test_preemption_computes_a_request_again():
    """A preempted request has no pages; later it goes on as if nothing had been."""
    engine = Engine()
    request = started(engine)
    engine.preempt(request)
    assert (request.pages, request.computed) == ([], 0)
    while engine.step():
        pass
    assert request.answer == expected()


def test_a_fork_shares_full_pages_and_copies_the_last_one():
    """Parent and child go on with the same answer, on pages of their own from the last one on."""
    engine = Engine()
    parent = started(engine)
    assert parent.computed % PAGE
    child = engine.fork(parent, "b")
    full = parent.computed // PAGE
    assert child.pages[:full] == parent.pages[:full]
    assert child.pages[full] != parent.pages[full]
    while engine.step():
        pass
    assert child.answer == parent.answer == expected()


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_a_roll_back_drops_tokens_that_are_computed_again(tokens):
    """The answer is shorter by that many tokens, and in the end the same."""
    engine = Engine()
    request = started(engine, 6)
    engine.roll_back(request, tokens)
    assert len(request.answer) == 6 - tokens
    while engine.step():
        pass
    assert request.answer == expected()


def test_a_roll_back_stops_at_the_prompt():
    """Tokens of the prompt are not dropped."""
    engine = Engine()
    request = started(engine, 3)
    engine.roll_back(request, 100)
    assert request.tokens == PROMPT


def test_an_aborted_request_gives_its_pages_back():
    """Waiting or running: afterwards every page is free or parked."""
    engine = Engine()
    running, waiting = started(engine), engine.submit("b", PROMPT, 4)
    engine.abort(waiting)
    engine.abort(running)
    assert not engine.step()
    assert len(engine.allocator.free_pages) + len(engine.cache.parked) == len(engine.allocator.users) - 1


def test_eviction_frees_what_nobody_holds():
    """The least recently used page goes first, and can't be hit any more."""
    engine = Engine()
    serve(engine, ("a", PROMPT, 2))
    first = next(iter(engine.cache.parked))
    assert engine.cache.evict() == [first]
    while engine.cache.evict():
        pass
    assert engine.cache.match(PROMPT) == []
    assert len(engine.allocator.free_pages) == len(engine.allocator.users) - 1


def test_padding_writes_to_the_null_block_only():
    """A decode batch of one row is filled up to four; three slots of page 0 are written, and no other page."""
    engine = Engine()
    request = started(engine)
    for kv in engine.pool.layers:
        kv[:, 0] = 0
    before = [kv.clone() for kv in engine.pool.layers]
    at = request.computed
    engine.step()
    for old, new in zip(before, engine.pool.layers, strict=True):
        changed = (old != new).any(-1).any(-1).any(0).nonzero().tolist()
        assert changed == [[0, 0], [0, 1], [0, 2], [request.pages[at // PAGE], at % PAGE]]


def test_wrong_kv_changes_the_answer():
    """Attention really reads the pool: with K or V of one layer gone, other tokens follow."""
    for layer in range(2):
        for half in range(2):
            engine = Engine()
            request = started(engine)
            engine.pool.layers[layer][half, torch.tensor(request.pages)] = 0
            while engine.step():
                pass
            assert request.answer != expected()


@pytest.mark.parametrize(("tokens", "new_tokens"), [([], 1), ([1], 0), ([1] * 180, 20)])
def test_requests_that_cannot_be_served_are_refused(tokens, new_tokens):
    """No tokens, nothing to answer, or more than the pool holds."""
    with pytest.raises(ValueError, match="'a' must"):
        Engine().submit("a", tokens, new_tokens)


def test_a_name_is_used_once_at_a_time():
    """A request of the same name must have ended."""
    engine = Engine()
    engine.submit("a", PROMPT, 2)
    with pytest.raises(ValueError, match="runs already"):
        engine.submit("a", PROMPT, 2)
